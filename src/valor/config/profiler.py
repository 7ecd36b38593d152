"""`global_profiler`, and `profiler` of a role: traces of chosen steps by torch's profiler."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

from valor.config.base import BARE_ITEM, PathStr, Section, key

Content = Literal["cpu", "cuda", "memory", "shapes", "stack"]


class ProfilerConfig(Section):
    """Traces of this role."""

    enable: bool = False
    """Trace every call of this role in the steps global_profiler.steps."""
    all_ranks: bool = key(False, ".enable")
    """Trace all ranks."""
    ranks: list[NonNegativeInt] = key([], {".enable": "", ".all_ranks=false": ""})
    """Ranks to trace; [] is rank 0."""

    def traces(self, rank: int) -> bool:
        """Whether the role is traced on this rank."""
        return self.enable and (self.all_ranks or rank in (self.ranks or [0]))


class GlobalProfilerConfig(Section):
    """Which steps are traced."""

    tool: Literal["torch"] | None = None
    """torch writes traces for chrome://tracing and Perfetto; null none."""
    steps: Annotated[list[PositiveInt] | None, BARE_ITEM] = key(None, ".tool")
    """Steps to trace."""
    save_path: PathStr = key("outputs/profile", ".tool")
    """Folder of the traces: step_N/rankR.ROLE.METHOD.CALL.json.gz."""

    contents: Annotated[list[Content], BARE_ITEM] = key(["cpu", "cuda"], ".tool")
    """What is recorded: cpu always, cuda where there is one; memory, shapes and stack make traces large."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.tool is not None and not self.steps:
            yield f"{at}tool={self.tool} traces the steps that {at}steps names: set it, such as {at}steps=[2,3]"
