"""The precision of cached keys and values, which every policy takes: their bits, and what stays unpacked.

The author of a policy need not read this file: policies see keys and values unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvatlas.core import CODES, KvatlasError, Storage
from kvatlas.policies.parameter_types import check_parameters, choice_param, int_param

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle

#: Rises with every change of packed numbers: part of the run keys of such settings.
STORAGE_VERSION = 2


@dataclass(frozen=True)
class KvPrecision:
    """The bits of cached numbers.

    kv_bits: bits of a cached number, 16 (the type of the model), 8, 4, 3 or 2.
    key_bits, value_bits: those of keys and of values alone; 0 for `kv_bits`.
    group: channels of a token that share a scale and a zero point, a multiple of 16.
    residual: newest tokens that are read in the type of the model, at most the local window.
    """

    kv_bits: int = choice_param(16, 8, 4, 3, 2)
    key_bits: int = choice_param(0, 16, 8, 4, 3, 2)
    value_bits: int = choice_param(0, 16, 8, 4, 3, 2)
    group: int = int_param(32, least=CODES)
    residual: int = int_param(32)

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.group % CODES:
            raise KvatlasError(f"group is {self.group}; expected a multiple of {CODES}.")

    def check(self, model: ModelHandle) -> None:
        """Raise KvatlasError for packed numbers with larger groups than a head, or a residual beyond the positions."""
        if not self.storage.packed:
            return
        sizes = [max(layer.key, layer.value) for layer in model.shape.cached_layers]
        # The default is a size of groups for every model: the last channel fills a group up.
        most = max(KvPrecision().group, -(-max(sizes, default=0) // CODES) * CODES)
        if self.group > most:
            raise KvatlasError(f"group is {self.group}; expected at most {most}, for the channels of a head.")
        if model.positions is not None and self.residual > model.positions:
            raise KvatlasError(f"residual is {self.residual}; expected at most {model.positions}, its positions.")

    @property
    def storage(self) -> Storage:
        """The form of cached keys and values."""
        keys = self.key_bits or self.kv_bits
        values = self.value_bits or self.kv_bits
        if keys == values == 16:
            # Unpacked numbers have neither groups nor unpacked copies.
            return Storage()
        return Storage(keys, values, self.group, self.residual)

    def canonical(self) -> KvPrecision:
        """Return the precision in its canonical form: equal storages have equal parameters."""
        storage = self.storage
        if storage.key_bits == storage.value_bits:
            return KvPrecision(storage.key_bits, 0, 0, storage.group, storage.residual)
        return KvPrecision(16, storage.key_bits, storage.value_bits, storage.group, storage.residual)


#: The parameters of a precision, in their order.
PRECISION_PARAMETERS = tuple(item.name for item in fields(KvPrecision))
