"""The benchmark's table and what follows from it; pure functions of rows."""

import statistics
from dataclasses import dataclass, field

from benchmark_rows import (
    AFTER_ACTING,
    INFERENCE,
    MEGABYTES,
    OURS,
    SAMPLE_STEPS,
    Row,
    env_row,
    network_row,
    parl_row,
    trainer_row,
)

GROWS = 1.05  # a rate that is not 5% better has stopped growing


@dataclass
class Results:
    """All values so far: one list of rounds by (name, who)."""

    units: dict[str, str] = field(default_factory=dict)
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, rows: list[Row]) -> None:
        for row in rows:
            self.units[row.name] = row.unit
            self.values.setdefault((row.name, row.who), []).append(row.value)

    def median(self, name: str, who: str = OURS) -> float | None:
        """The median over the rounds, or None where it was not measured."""
        values = self.values.get((name, who))
        return statistics.median(values) if values else None

    def best_peer(self, name: str) -> tuple[str, float] | None:
        """The peer with the highest median in this row."""
        peers = [who for row_name, who in self.values if row_name == name and who != OURS]
        return max(((who, self.median(name, who)) for who in peers), key=lambda peer: peer[1], default=None)

    def ratio(self, name: str) -> float | None:
        """Our median over that of the best peer."""
        ours, peer = self.median(name), self.best_peer(name)
        return ours / peer[1] if ours and peer and peer[1] else None

    def as_records(self) -> list[dict]:
        """Ready for JSON: every row with its rounds."""
        fields = ("name", "who", "unit", "median", "rounds")
        return [
            dict(zip(fields, (name, who, self.units[name], self.median(name, who), rounds), strict=True))
            for (name, who), rounds in self.values.items()
        ]


def table(results: Results) -> list[str]:
    """One line per name: our median and its range over the rounds, the best peer's median, the ratio."""
    lines = [("what", "unit", "ours", "(min to max)", "best peer", "ratio", "which")]
    for name, unit in results.units.items():
        ours, peer, ratio = results.median(name), results.best_peer(name), results.ratio(name)
        rounds = results.values.get((name, OURS), [])
        lines.append(
            (
                name,
                unit,
                "-" if ours is None else _number(ours),
                f"({_number(min(rounds))} to {_number(max(rounds))})" if len(rounds) > 1 else "",
                _number(peer[1]) if peer else "",
                f"{ratio:.2f}" if ratio else "",
                peer[0] if peer else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if 2 <= index <= 5 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return [aligned[0], "-" * max(map(len, aligned)), *aligned[1:]]


def additive_limit(cores: int, rates: list[float]) -> float:
    """Sample steps/s where each sample step costs 1/rate core-seconds of each part, and nothing else."""
    return cores / sum(1 / rate for rate in rates)


def conclusions(results: Results, cores: int, precision: str, actor_num: int, env_num: int, steps: int) -> dict:
    """What the rows say together, at the default settings; what was not measured is left out."""
    local = results.median(trainer_row("local", actor_num * env_num, steps))
    found: dict[str, float] = {}
    parts = {
        "emulator": env_row(env_num, 1),
        "inference": network_row(INFERENCE, env_num, precision, 1),
        "learning": network_row(AFTER_ACTING, actor_num * env_num * steps, precision, 1),
    }
    rates = {part: results.median(name) for part, name in parts.items()}
    if all(rates.values()):
        found |= {f"{part}, core-ms per sample step": 1e3 / rate for part, rate in rates.items()}
        found["additive limit, sample steps/s"] = limit = additive_limit(cores, list(rates.values()))
        if local:
            found["local / additive limit"] = local / limit
    for overlap in (False, True):
        parl = results.median(parl_row(actor_num, env_num, steps, overlap))
        if local and parl:
            found[f"parl / local, {actor_num} actors each{', overlap' if overlap else ''}"] = parl / local
    return found


def lines(found: dict[str, float]) -> list[str]:
    """Conclusions as text."""
    return [f"{name}: {f'{value:.0%}' if ' / ' in name else _number(value)}" for name, value in found.items()]


def simulation_table(records: list[dict]) -> list[str]:
    """Sample steps/s, traffic and milliseconds per stage, one line per number of stub actors."""
    lines = []
    for record in records:
        if "skipped" in record:
            lines.append(f"{record['actors']:>6} actors: skipped, {record['skipped']}")
            continue
        update_ms = sum(record["stage_ms"].values())
        stages = ", ".join(f"{stage} {ms:,.1f} ({ms / update_ms:.0%})" for stage, ms in record["stage_ms"].items())
        lines += [
            f"{record['actors']:>6} actors: {record['sample_steps_per_s']:>7,.0f} {SAMPLE_STEPS}, "
            f"{record['received_mb_per_s']:,.1f} MB/s in, {record['sent_mb_per_s']:,.1f} MB/s of weights out, "
            f"peak memory {record['peak_memory_mb']:,.0f} {MEGABYTES}",
            f"{'':>14} ms per update: {stages}",
            f"{'':>14} without learning: {record['intake_limit_per_s']:,.0f} {SAMPLE_STEPS}",
        ]
    measured = [record for record in records if "skipped" not in record]
    return lines + [growth_sentence(measured)] * (len(measured) > 1)


def growth_sentence(records: list[dict]) -> str:
    """Where the intake stops growing with the number of actors, and which stage then takes most of the time."""
    ordered = sorted(records, key=lambda record: record["actors"])
    best = ordered[0]
    for record in ordered[1:]:
        if record["sample_steps_per_s"] > GROWS * best["sample_steps_per_s"]:
            best = record
    stage, ms = max(best["stage_ms"].items(), key=lambda item: item[1])
    share = ms / sum(best["stage_ms"].values())
    verb = "still grows" if best is ordered[-1] else "stops growing"
    return (
        f"the intake {verb} at {best['actors']} actors and {best['sample_steps_per_s']:,.0f} {SAMPLE_STEPS}; "
        f"there {stage!r} takes {share:.0%}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"
