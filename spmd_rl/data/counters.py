"""What an edge has cost so far."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class EdgeCounters:
    """Sums over the exchanges of one edge on this rank; bytes without the metadata, times in seconds.

    local_hits: handed over by reference; direct: written straight into the receivers' memory; exposed_s: spent in
    `Pending.wait`; total_s: from `start` to the result; metadata_s: until all ranks had met and the metadata was known;
    before, after: sums of max / mean load.
    """

    exchanges: int = 0
    local_hits: int = 0
    direct: int = 0
    samples_out: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_local: int = 0
    metadata_bytes: int = 0
    metadata_s: float = 0.0
    plan_s: float = 0.0
    copy_s: float = 0.0
    flight_s: float = 0.0
    exposed_s: float = 0.0
    total_s: float = 0.0
    before: float = 0.0
    after: float = 0.0

    def since(self, earlier: EdgeCounters) -> EdgeCounters:
        return EdgeCounters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
