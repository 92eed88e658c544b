"""What a run tells about itself: events, black boxes, metrics."""
