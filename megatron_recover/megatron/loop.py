"""Seam: Megatron's training loop itself: its start, its steps, its data sets, its end below the minimum."""

from __future__ import annotations

import functools
from typing import Any

from megatron_recover.errors import NotSaved, StoppedBySignal, TooFewReplicas, UserError
from megatron_recover.megatron import checkpoint, state_faults
from megatron_recover.megatron.adapter import Adapter
from megatron_recover.megatron.decisions import SIGNAL
from megatron_recover.megatron.fingerprint import hash_parameters


def install(adapter: Adapter) -> None:
    """Wraps ``train``, ``train_step`` and the building of data sets."""
    from megatron.training import get_args, training

    session = adapter.session
    stock_step = training.train_step
    stock_train = training.train
    stock_setup = training.setup_model_and_optimizer
    stock_last_evaluation = training.evaluate_and_print_results
    stock_build = training.build_train_valid_test_data_iterators

    @functools.wraps(stock_step)
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        if adapter.metrics is not None:
            adapter.metrics.start()
        session.check_finite = get_args().check_for_nan_in_loss_and_grad
        if adapter.optimizer is None:  # the first step
            state_faults.offer(session.injector, model)
        adapter.completed = get_args().curr_iteration
        interval = adapter.config.check_replicas_interval
        if interval and (adapter.optimizer is None or adapter.completed % interval == 0):
            session.fingerprint = (*session.fingerprint, "parameters", hash_parameters(model))
        adapter.model, adapter.optimizer, adapter.scheduler = model, optimizer, opt_param_scheduler
        result = stock_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, *args, **options)
        adapter.completed += 1
        session.fingerprint = ("gradient norm", _exact(result[5]))
        return result

    @functools.wraps(stock_train)
    def train(*args: Any, **options: Any) -> Any:
        adapter.saver.starts()
        try:
            result = stock_train(*args, **options)
        except SystemExit as end:  # by signal, time or iteration, and on all ranks alike
            if not end.code:
                checkpoint.raise_if_unsaved(adapter)
            if session.decisions[SIGNAL]:
                what = f"exit signal received, the last iteration is {adapter.completed}"
                raise StoppedBySignal(what, saved=bool(get_args().save)) from None
            raise
        except (TooFewReplicas, StoppedBySignal) as error:
            # Raised by all ranks at the same agreement, before the optimizer step or in evaluation: parameters and
            # counters are those after `completed` iterations.
            what = f"{error}; {checkpoint.save_now(adapter, adapter.completed)}"
            if isinstance(error, TooFewReplicas):
                raise TooFewReplicas(what) from None
            if adapter.saver.is_unsaved:
                raise NotSaved(what) from None
            raise StoppedBySignal(what, saved=bool(get_args().save)) from None
        adapter.is_trained = True
        return result

    @functools.wraps(stock_build)
    def build_train_valid_test_data_iterators(*args: Any, **options: Any) -> Any:
        # The first to come writes the index caches beside the data; the leader does, then the others read.
        built: list[Any] = []
        session.by_leader(lambda: built.append(_build(*args, **options)))
        return built[0] if built else _build(*args, **options)

    def _build(*args: Any, **options: Any) -> Any:
        adapter.at("datasets")
        try:
            return stock_build(*args, **options)
        except FileNotFoundError as error:
            raise UserError(
                f"the data set cannot be read ({error}): check --data-path, or make one with "
                "`megatron-recover prepare-data`."
            ) from error

    @functools.wraps(stock_setup)
    def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
        adapter.at("model")
        return stock_setup(*args, **options)

    training.setup_model_and_optimizer = setup_model_and_optimizer
    @functools.wraps(stock_last_evaluation)
    def evaluate_and_print_results(*args: Any, **options: Any) -> Any:
        try:
            return stock_last_evaluation(*args, **options)
        except (TooFewReplicas, StoppedBySignal) as error:
            if not adapter.is_trained:
                raise  # train() sees to it
            checkpoint.finish(adapter)
            checkpoint.raise_if_unsaved(adapter)
            if isinstance(error, StoppedBySignal):
                raise StoppedBySignal(f"{error}; training was complete", saved=bool(get_args().save)) from None
            raise

    training.evaluate_and_print_results = evaluate_and_print_results
    training.train_step = train_step
    training.train = train
    training.build_train_valid_test_data_iterators = build_train_valid_test_data_iterators


def _exact(value: Any) -> str:
    """A number by its bits, so that equal means equal and NaN equals NaN."""
    return float(value).hex() if value is not None else "none"
