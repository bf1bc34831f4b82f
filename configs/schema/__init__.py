"""What may be set: one frozen pydantic class for each section of a config, checked when the config is loaded.

A command's config is the class that names it, such as `EvalConfig` for `eval/run.py`; `configs.runtime.load_config` reads one.
"""

from configs.schema.commands.release import ExportConfig, ImportConfig, PushConfig
from configs.schema.data import AnswersConfig, AnswerServerConfig, CacheConfig, DataConfig, PromptsConfig, ServerConfig
from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.evaluation import (
    CompareConfig,
    CostConfig,
    EvalConfig,
    GateConfig,
    LosslessConfig,
    PredictConfig,
    QualityConfig,
    SuiteConfig,
)
from configs.schema.learning import LossConfig, OptimizerConfig, PolicyConfig, StudentConfig
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig, HeadsConfig, ScheduleConfig, TrainingDataConfig

__all__ = [
    "AnswerServerConfig",
    "AnswersConfig",
    "CacheConfig",
    "CompareConfig",
    "CostConfig",
    "DataConfig",
    "DecodeConfig",
    "DistillConfig",
    "EvalConfig",
    "ExportConfig",
    "GateConfig",
    "HeadsConfig",
    "ImportConfig",
    "LossConfig",
    "LosslessConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PredictConfig",
    "PromptsConfig",
    "PushConfig",
    "QualityConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "ServerConfig",
    "StudentConfig",
    "SuiteConfig",
    "TargetConfig",
    "TrainingDataConfig",
]
