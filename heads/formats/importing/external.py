"""A draft that another program wrote, with the settings and tensor names of our families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.commands.release import LayerIds
from heads.families.registry import FAMILIES
from heads.formats.layout import Shapes
from heads.frozen.checkpoint_files import Weights


@dataclass(frozen=True, kw_only=True)
class ExternalDraft:
    """A draft as another program wrote it.

    settings: of our family `kind`, checked later.
    layer: the config of its layers; None: they have no sizes of their own.
    weights: its tensors under our names, and `embed_tokens.weight`, `d2t`, `t2d` where they are in the file.
    num_speculative_tokens: what its config says; None: nothing.
    optional: what to add where the file leaves it out.
    layer_ids: what the ids of hidden states in its config were taken to mean; None: it has none.
    placed: gives further tensors by the shapes of ours, where their names alone do not identify them.
    """

    form: str
    kind: str
    settings: Mapping[str, Any]
    layer: Mapping[str, Any] | None
    weights: Weights
    num_speculative_tokens: int | None = None
    optional: Weights = field(default_factory=dict)
    layer_ids: LayerIds | None = None
    placed: Callable[[Shapes], Weights] | None = None

    def checked_settings(self, **more: Any) -> Any:
        """Return the family's settings, with further ones; an InputError names a value that the family does not take."""
        try:
            return FAMILIES[self.kind].settings.model_validate(dict(self.settings) | {"kind": self.kind} | more)
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}") from error
