"""How a model is spread over the ranks of a trainer: sizes, coordinates, layers of a stage. Pure arithmetic.

The orders are those of Megatron-Core's `parallel_state` (default order `tp-cp-ep-dp-pp`): the leftmost varies fastest.
Attention and dense layers see tp-cp-dp-pp, experts see etp-ep-edp-pp over the same ranks, where
edp = tp * cp * dp / (etp * ep).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from moe_asyncrl.config.recipe import Trainer
from moe_asyncrl.data.errors import UserError


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Where one rank stands along each axis, each counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the trainer's axes.

    Raises:
        UserError: a size below 1, or sizes that do not fit together.
    """

    tp: int = 1
    """Tensor parallelism of attention and dense layers; above 1 it brings sequence parallelism with it."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int | None = None
    """Model chunks of each pipeline rank (interleaved schedule); None for one chunk without interleaving."""
    ep: int = 1
    """Expert parallelism: each rank keeps num_experts / ep experts."""
    etp: int = 0
    """Tensor parallelism inside an expert. 0 picks `tp` without expert parallelism and 1 with it, and is never seen
    on the finished layout."""
    cp: int = 1
    """Context parallelism: each rank keeps 1 / cp of every sequence."""
    dp: int = 1
    """Copies of the dense layers that see different sequences. Expert parallelism is laid over tp * cp * dp ranks."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage, pp * vpp numbers in the order of the layers; None splits them evenly."""

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp if self.ep == 1 else 1)
        for axis in ("tp", "pp", "ep", "etp", "cp", "dp"):
            if getattr(self, axis) < 1:
                raise UserError(f"layout: {axis} is {getattr(self, axis)}, it must be at least 1")
        if self.vpp is not None and (self.vpp < 1 or self.pp == 1):
            raise UserError(f"layout: vpp is {self.vpp} with pp {self.pp}; it needs pp >= 2 and vpp >= 1, or none")
        stages, given = self.pp * self.chunks, self.stage_layers
        if given is not None and (len(given) != stages or min(given) < 1):
            raise UserError(f"layout: stage_layers is {list(given)}; it needs {stages} numbers, each at least 1")
        if self.ep == 1 and self.etp != self.tp:
            # Megatron-Core 0.16.1 then reduces the experts' gradients like dense ones, over too few ranks.
            raise UserError(f"layout: etp is {self.etp} without expert parallelism; it must then equal tp {self.tp}")
        if (self.tp * self.cp * self.dp) % (self.etp * self.ep):
            raise UserError(
                f"layout: tp*cp*dp = {self.tp * self.cp * self.dp} ranks of a stage cannot hold etp*ep = "
                f"{self.etp * self.ep}; raise dp or lower ep ({self})"
            )

    @classmethod
    def of(cls, settings: Trainer) -> Layout:
        """The layout that a recipe's trainer section asks for."""
        s = settings
        return cls(
            tp=s.tp,
            pp=s.pp,
            vpp=s.vpp,
            ep=s.ep,
            etp=s.tp if s.etp is None else s.etp,
            cp=s.cp,
            dp=s.dp,
            stage_layers=s.stage_layers,
        )

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")}
        if self.etp == (self.tp if self.ep == 1 else 1):
            del sizes["etp"]
        shown = [f"{axis}{size}" for axis, size in sizes.items() if size not in (1, None)]
        if self.stage_layers is not None:
            shown.append("layers" + "-".join(map(str, self.stage_layers)))
        return "x".join(shown) or "single"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Copies of each expert's weights within a pipeline stage."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def chunks(self) -> int:
        """Model chunks that each rank builds."""
        return self.vpp or 1

    def coordinates(self, rank: int) -> RankCoordinates:
        """Where `rank` stands. Raises UserError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise UserError(f"layout {self}: rank {rank} is outside 0..{self.world_size - 1}")
        in_stage, pp = rank % (self.world_size // self.pp), rank // (self.world_size // self.pp)
        return RankCoordinates(
            tp=in_stage % self.tp,
            cp=in_stage // self.tp % self.cp,
            dp=in_stage // (self.tp * self.cp),
            pp=pp,
            etp=in_stage % self.etp,
            ep=in_stage // self.etp % self.ep,
            edp=in_stage // (self.etp * self.ep),
        )

    def layers_of(self, pp_rank: int, chunk: int, num_layers: int) -> range:
        """Global numbers (from 0) of the layers in one chunk of one pipeline rank.

        With interleaving, chunk c of rank p holds stage c * pp + p. Raises UserError if the layers do not split evenly
        and no split is given, or the given one has another number of layers.
        """
        stages = self._stages(num_layers)
        if not (0 <= pp_rank < self.pp and 0 <= chunk < self.chunks):
            raise UserError(f"layout {self}: there is no chunk {chunk} of pipeline rank {pp_rank}")
        return stages[chunk * self.pp + pp_rank]

    def owner_of_layer(self, layer: int, num_layers: int) -> tuple[int, int]:
        """The (pipeline rank, chunk) that holds global layer `layer`. Raises UserError as `layers_of`."""
        for stage, layers in enumerate(self._stages(num_layers)):
            if layer in layers:
                return stage % self.pp, stage // self.pp
        raise UserError(f"layout {self}: layer {layer} is outside 0..{num_layers - 1}")

    def _stages(self, num_layers: int) -> list[range]:
        """The layers of each stage."""
        count, sizes = self.pp * self.chunks, self.stage_layers
        if sizes is None:
            if num_layers % count:
                raise UserError(
                    f"layout {self}: {num_layers} layers do not split evenly over {count} pipeline stages; give "
                    "stage_layers, or other stages"
                )
            sizes = (num_layers // count,) * count
        if sum(sizes) != num_layers:
            raise UserError(f"layout {self}: stage_layers has {sum(sizes)} layers, the model {num_layers}")
        return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]

    def experts_of(self, ep_rank: int, num_experts: int) -> range:
        """Global numbers of the experts on one expert-parallel rank. Raises UserError if the split is uneven."""
        if num_experts % self.ep:
            raise UserError(f"layout {self}: {num_experts} experts do not split evenly over ep {self.ep}")
        size = num_experts // self.ep
        return range(ep_rank * size, (ep_rank + 1) * size)
