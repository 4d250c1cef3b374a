"""What the tries of a test process share: data, the runs that nothing has disturbed, and servers; and who was lost."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.data.ingest.digits import ingest_digits
from tests.faults.commands import SCENARIO, SMALL, Workspace
from tests.faults.judge import facts
from tests.tracked import fresh_database

if TYPE_CHECKING:
    from tests.mlflow_server import Servers


@dataclass
class Lab:
    """One try: its own folder, what it shares with others, and the faults that it has met so far.

    Attributes:
        folder: of this try.
        shared: of all tries of this test process.
        known: the facts of undisturbed runs, by name.
        start_servers: gives the object store and the tracking server, started when first asked for.
        forked: how its runs are started.
        phases: to which the faults of a chain are limited; none for all of them.
        rows: of the table, one for each fault.
        safe: how many of them did no harm.
    """

    folder: Path
    shared: Path
    known: dict[str, dict[str, Any]]
    start_servers: "Callable[[], Servers]"
    forked: bool = True
    phases: tuple[str, ...] = ()
    rows: list[str] = field(default_factory=list)
    safe: int = 0

    @property
    def data(self) -> Path:
        """A small data set."""
        return ingest_digits(self.shared / "data", train=120, test=40, size=32).path

    def run(
        self, *settings: str, folder: Path | None = None, method: str = "csc", data: Path | None = None
    ) -> Workspace:
        """The small run that most tries disturb."""
        work = (folder or self.folder) / "work"
        command = ("run", SCENARIO, "--method", method, "--data", data or self.data, "--workdir", work)
        small = SMALL if method == "csc" else SMALL[:-1]  # the last is a setting of that method
        return Workspace(work.parent, command, (*small, *settings), forked=self.forked)

    def undisturbed(
        self, name: str = "csc", make: Callable[[], Workspace] | None = None, method: str = "csc"
    ) -> dict[str, Any]:
        """What a run leaves that nothing disturbs; it is run when first asked for."""
        if name not in self.known:
            workspace = make() if make else self.run(folder=self.shared / name)
            if "MLFLOW_TRACKING_URI" not in workspace.variables:  # no server, but a database of its own
                fresh_database(workspace.work)
            workspace.finish()
            self.known[name] = facts(workspace, method)
        return self.known[name]

    def tried(self, row: str) -> None:
        """A fault has happened."""
        self.rows.append(row)

    def survived(self) -> None:
        """All faults so far did no harm."""
        self.safe = len(self.rows)

    def chosen(self, phases: Iterable[str]) -> list[str]:
        """All phases, or those of this try, or those that PHASE names, to find out which of a chain did harm."""
        wanted = tuple(named.split(",")) if (named := os.environ.get("PHASE")) else self.phases
        return [phase for phase in phases if phase in wanted or not wanted]
