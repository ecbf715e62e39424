"""Every name inside Lightning and torchmetrics that the adapter relies on.

They are not part of a public API, so a release may rename them. `check` looks for all of them
before the adapter is built on them, and refuses a Lightning that lacks one with the name and what
it is needed for, not later with an AttributeError in the middle of a repair. A test fails when the
adapter touches a private name that is not listed here.
"""

from __future__ import annotations

from taskd.integrations import versions
from taskd.runtime.private_names import PrivateName

_LOOPS = "lightning.pytorch.loops"
_FIT_LOOP = f"{_LOOPS}.fit_loop:_FitLoop"
_EPOCH_LOOP = f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop"
_AUTOMATIC = f"{_LOOPS}.optimization.automatic"
_MANUAL = f"{_LOOPS}.optimization.manual"
_FETCHER = f"{_LOOPS}.fetchers:_DataFetcher"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_CHECKPOINTS = f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector"
_LOGGED = f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector"
_RESULT = f"{_CONNECTORS}.logger_connector.result"
_CSV = "lightning.pytorch.loggers.csv_logs"
_DDP = "lightning.pytorch.strategies:DDPStrategy"
_REDIRECTION = "lightning.pytorch.strategies.ddp:_DDPForwardRedirection"
_TRAINER = "lightning.pytorch:Trainer"


def _names(owner: str, names: str, purpose: str) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(owner, name, purpose) for name in names.split())


NAMES = (
    *_names(
        _FIT_LOOP,
        "epoch_loop epoch_progress setup_data on_run_start on_run_end done _combined_loader "
        "_data_fetcher",
        "giving the batches of the job's steps to the loop over epochs",
    ),
    *_names(
        _FIT_LOOP,
        "_restart_stage reset_restart_stage on_advance_start",
        "entering an epoch in the middle",
    ),
    *_names(
        f"{_LOOPS}.fit_loop:RestartStage", "RESTARTED_MID_EPOCH", "entering an epoch in the middle"
    ),
    *_names(
        _EPOCH_LOOP,
        "advance reset done batch_idx update_lr_schedulers _broadcast_sigterm_tensor "
        "automatic_optimization manual_optimization",
        "repeating a batch",
    ),
    *_names(
        _EPOCH_LOOP,
        "batch_progress val_loop _batches_that_stepped",
        "the position of a replacement in the loops",
    ),
    *_names(_EPOCH_LOOP, "_results", "what was logged in this epoch"),
    *_names(
        f"{_LOOPS}.evaluation_loop:_EvaluationLoop",
        "_has_run restarting",
        "the position of a replacement in the loops",
    ),
    *_names(
        f"{_LOOPS}.loop:_Loop",
        "_restarting _loaded_from_state_dict _resuming_from_checkpoint",
        "the first batch after a checkpoint",
    ),
    *_names(_EPOCH_LOOP, "_skip_next_val _restart_stage", "the first batch after a checkpoint"),
    *_names(f"{_LOOPS}.loop", "_Loop", "the position of a replacement in the loops"),
    *_names(f"{_LOOPS}.progress", "_BaseProgress", "the position of a replacement in the loops"),
    *_names(f"{_AUTOMATIC}:_AutomaticOptimization", "run _make_closure", "repeating a batch"),
    *_names(f"{_AUTOMATIC}:Closure", "closure", "the output of a training step"),
    *_names(f"{_MANUAL}:_ManualOptimization", "run", "repeating a batch"),
    *_names(
        _FETCHER,
        "setup fetched done length _start_profiler _stop_profiler",
        "giving the batches of the job's steps to the loop over epochs",
    ),
    *_names(_TRAINER, "_checkpoint_connector", "the state of a replacement"),
    *_names(_CHECKPOINTS, "resume_start", "the state of a replacement"),
    *_names(_DDP, "_forward_redirection", "repeating a batch"),
    *_names(_REDIRECTION, "__call__ on_after_outer_forward", "repeating a batch"),
    *_names(_DDP, "_ddp_comm_state _model_averaging_period", "refusing options of DDP"),
    *_names(
        "lightning.pytorch:LightningModule",
        "_current_fx_name _param_requires_grad_state",
        "repeating a batch",
    ),
    *_names(f"{_CSV}:CSVLogger", "_version _experiment", "writing on in the log of a lost rank"),
    *_names(
        f"{_CSV}:ExperimentWriter",
        "metrics metrics_keys metrics_file_path _check_log_dir_exists",
        "writing on in the log of a lost rank",
    ),
    *_names(_TRAINER, "_logger_connector", "what was logged in this epoch"),
    *_names(
        _LOGGED,
        "_progress_bar_metrics _logged_metrics _callback_metrics _first_loop_iter _current_fx",
        "what was logged in this epoch",
    ),
    *_names(
        f"{_RESULT}:_ResultMetric",
        "meta is_tensor has_reset _forward_cache _computed _update_count",
        "what was logged in this epoch",
    ),
    *_names(_RESULT, "_ResultCollection", "what was logged in this epoch"),
    *_names(f"{_RESULT}:_Metadata", "sync reduce_fx _sync", "what was logged in this epoch"),
    *_names(
        f"{_RESULT}:_Sync", "rank_zero_only group _should _op", "what was logged in this epoch"
    ),
    *_names(
        "torchmetrics:Metric",
        "dist_sync_fn _defaults _computed _forward_cache _update_count",
        "the torchmetrics of a replacement",
    ),
)


def check() -> None:
    """Raise SettingsError if Lightning is not the one for which the adapter was written."""
    versions.check("lightning", "2.6", "2.7", NAMES)
