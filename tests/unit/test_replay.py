"""Calls that a rank which does not lead remembers for the case that it has to make them."""

from __future__ import annotations

from unittest.mock import Mock, call

from megatron_recover.telemetry.replay import ReplayWriter, forget, replay


def test_calls_are_made_later_in_order_on_whatever_they_were_made() -> None:
    stand_in, real = ReplayWriter(), Mock()
    assert stand_in
    stand_in.add_scalar("lm loss", 1.5, 3)
    stand_in.config.update({"a": 1}, allow_val_change=True)
    replay(stand_in, real)
    assert real.mock_calls == [call.add_scalar("lm loss", 1.5, 3), call.config.update({"a": 1}, allow_val_change=True)]
    replay(stand_in, real)
    assert len(real.mock_calls) == 2


def test_what_all_have_agreed_on_is_forgotten() -> None:
    stand_in, real = ReplayWriter(), Mock()
    stand_in.log({"x": 1}, 2)
    forget(stand_in)
    replay(stand_in, real)
    assert real.mock_calls == []
