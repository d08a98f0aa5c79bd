"""report.html: one self-contained page of a run. ``draw_report`` draws it, also while the run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from farflung import __version__
from farflung.config import Recipe, dump_recipe
from farflung.core.errors import BadInput
from farflung.report.charts import draw, latest, number, percent
from farflung.report.curves import curves, pool_color, rate, total
from farflung.report.data import RunData, StreamRow, read_run
from farflung.report.scores import scores
from farflung.report.transcript import Piece, Reading, Turn, choose, load_tokenizer

UNSURE = 0.5
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
SHOWN_EVENTS = 12


def draw_report(run_dir: Path, out: Path | None = None) -> Path:
    """Draw the run's report to ``out`` (RUN/report.html) and return that path. Raises BadInput, Corrupt."""
    page = render(read_run(run_dir))
    out = out or run_dir / "report.html"
    if out.is_dir():
        raise BadInput("it is a folder", where=str(out), mend=f"name a file, such as {out / 'report.html'}")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise BadInput(f"cannot be written: {error.strerror}", where=str(out), mend="give another --out") from None
    return out


def render(run: RunData) -> str:
    """The page as text."""
    readings, unreadable = _readings(run)
    assets = files("farflung") / "assets" / "report"
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        (assets / "page.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        css=Markup((assets / "page.css").read_text(encoding="utf-8")),
        js=Markup((assets / "page.js").read_text(encoding="utf-8")),
        name=run.recipe.run.name,
        finished=run.finished,
        badge="finished" if run.finished else f"{len(run.updates)} of {run.recipe.run.updates} updates",
        lead=_lead(run),
        scores=scores(run.evaluations),
        facts=_facts(run),
        pools=_pools(run),
        charts=[{"title": c.title, "note": c.note, "latest": latest(c), "svg": Markup(draw(c))} for c in curves(run)],
        endings=_endings(run),
        drops=run.drops,
        events=[(clock(at), kind.replace("_", " "), detail) for at, kind, detail in run.events[:SHOWN_EVENTS]],
        readings=readings,
        unreadable=unreadable,
        versions=_versions(run),
        settings=_settings(run.recipe),
        footer=f"Drawn by farflung {__version__} from {run.folder / 'ledger.sqlite'} on {time.strftime('%Y-%m-%d %H:%M')}. "
        "Shares and means are over action tokens; rewards are over episodes. The page needs no network.",
    )


def visible(text: str) -> str:
    """Control characters as their pictures: what a model or a program printed must not steer the page."""
    return text.translate(CONTROLS)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _lead(run: RunData) -> str:
    recipe = run.recipe
    pools = ", ".join(f"{pool.name} ({pool.replicas * pool.capacity} sessions)" for pool in recipe.pools)
    how = "in turns with training" if recipe.run.sync else "while it trained"
    return (
        f"{recipe.model.path} learnt from {sum(e.count for e in run.endings):,} episodes, sampled {how} by "
        f"{'the pool' if len(recipe.pools) == 1 else f'{len(recipe.pools)} pools'} {pools}."
    )


def _facts(run: RunData) -> list[tuple[str, str]]:
    whole = total(run)
    dropped = sum(drop.final for drop in run.drops)
    return [
        (f"{len(run.updates)} / {run.recipe.run.updates}", "updates"),
        (f"{sum(e.count for e in run.endings):,}", "episodes finished"),
        (clock(run.seconds), "from first group to last event"),
        (f"{run.peak_rss_bytes / 2**30:.1f} GiB", "of memory at most, all processes"),
        (f"{whole.staleness:.1f}", f"versions of staleness on average, {whole.staleness_max} at most"),
        (str(dropped), "episodes dropped"),
        (number(sum(rate(points) for points in run.pools.values())), "sampled tokens per second"),
        (number(whole.tokens), "action tokens in all updates"),
        (percent(whole.out_of_band), "of them with p/q outside [0.2, 5]"),
    ]


def _pools(run: RunData) -> list[dict[str, Any]]:
    pools = run.recipe.pools
    capacity = sum(pool.capacity * pool.replicas for pool in pools)
    stats = {pool.name: total(run, pool.name) for pool in pools}
    samples = max(1, sum(s.samples for s in stats.values()))
    return [
        {
            "name": pool.name,
            "color": pool_color(place),
            "weights": pool.weights,
            "kv": pool.kv,
            "replicas": pool.replicas,
            "capacity_share": percent(pool.capacity * pool.replicas / capacity),
            "sample_share": percent(mine.samples / samples),
            "kl": number(mine.kl),
            "k3": number(mine.k3),
            "out_of_band": percent(mine.out_of_band),
            "masked": percent(mine.masked),
            "staleness": f"{mine.staleness:.1f}",
            "reward": percent(mine.reward),
            "tokens_per_s": number(rate(run.pools.get(pool.name, ()))),
        }
        for place, pool in enumerate(pools)
        for mine in [stats[pool.name]]
    ]


def _endings(run: RunData) -> list[dict[str, Any]]:
    count = max(1, sum(e.count for e in run.endings))
    return [
        {
            "end": e.end.replace("_", " "),
            "count": e.count,
            "share": percent(e.count / count),
            "width": f"{100 * e.count / count:.1f}",
            "reward": percent(e.reward),
        }
        for e in run.endings
    ]


def _versions(run: RunData) -> dict[str, Any]:
    deltas = run.versions[1:]
    if not run.versions:
        return {"text": "None published yet.", "formats": [], "streams": [], "rows": [], "replicas": []}
    text = f"Version 0 is the starting policy, {number(run.versions[0].total)} values."
    if deltas:
        changed = sum(v.changed for v in deltas) / max(1, sum(v.total for v in deltas))
        text += f" The {len(deltas)} after it changed {percent(changed)} of its BF16 values on average."
    of = {(row.version, row.format): row for row in run.streams}
    formats = list(dict.fromkeys(row.format for row in run.streams))
    rows = [
        (v.number, clock(v.at) if v.at > 0 else "start", [_stream(of.get((v.number, format))) for format in formats])
        for v in reversed(run.versions)
    ]
    return {"text": text, "formats": formats, "streams": _streams(run), "rows": rows, "replicas": _replicas(run)}


def _stream(row: StreamRow | None) -> str:
    return "–" if row is None or not row.version else f"{row.bytes:,} ({percent(row.changed / max(1, row.elements))})"


def _streams(run: RunData) -> list[tuple[str, ...]]:
    """By format: bytes of a version, share of elements changed, bytes per changed element, and over the bound."""
    found: list[tuple[str, ...]] = []
    for format in dict.fromkeys(row.format for row in run.streams):
        rows = [row for row in run.streams if row.format == format and row.version]
        size, changed, bound = (sum(getattr(row, key) for row in rows) for key in ("bytes", "changed", "bound"))
        found.append(
            (
                format,
                number(size / max(1, len(rows))),
                percent(changed / max(1, sum(row.elements for row in rows))),
                f"{size / changed:.2f}" if changed else "–",
                f"{size / bound:.2f}×" if bound else "–",
            )
        )
    return found


def _replicas(run: RunData) -> list[tuple[str, ...]]:
    """By replica: versions loaded and passed over, how far behind it was last, bytes, and seconds of a load."""
    return [
        (
            row.name,
            str(row.loads),
            str(row.skipped),
            str(row.lag),
            number(row.bytes / row.loads),
            f"{row.stage_seconds / row.loads:.2f}",
            f"{1000 * row.pause_seconds / row.loads:.1f}",
        )
        for row in run.replicas
        if row.loads
    ]


def _settings(recipe: Recipe) -> list[dict[str, Any]]:
    given, default = dump_recipe(recipe), dump_recipe(Recipe())
    plain = default["pools"][0]

    def rows(values: Mapping[str, Any], usual: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
        return [(key, _value(value), value != usual[key]) for key, value in values.items()]

    sections = [(name, rows(values, default[name])) for name, values in given.items() if isinstance(values, dict)]
    sections += [(f"pool {pool['name']}", rows(pool, plain)) for pool in given["pools"]]
    return [{"name": name, "rows": found} for name, found in sections]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _readings(run: RunData) -> tuple[list[dict[str, Any]], str]:
    """The chosen episodes as the template shows them, or why there are none."""
    try:
        tokenizer = load_tokenizer(run.model)
    except BadInput as error:
        return [], f"They cannot be shown: {error}"
    return [_reading(reading) for reading in choose(run.episodes, tokenizer)], ""


def _reading(reading: Reading) -> dict[str, Any]:
    episode = reading.episode
    seconds = episode.seconds.get("total")
    about = [
        episode.task,
        f"ended as {episode.end.replace('_', ' ')}",
        f"{episode.turns} turns",
        f"{len(episode.trajectory.ids)} tokens",
        *([f"{seconds:.1f} s"] if seconds else []),
        ", ".join(reading.origins[:4]) + (" …" if len(reading.origins) > 4 else ""),
    ]
    titles = {"solved": "Solved", "failed": "Failed", "format error": "Ended in a format error"}
    return {
        "kind": reading.kind,
        "title": titles[reading.kind],
        "about": " · ".join(part for part in about if part),
        "turns": list(_turns(reading.turns)),
        "patch": _patch(episode.patch),
        "detail": visible(episode.detail.strip()),
    }


def _turns(turns: Iterable[Turn]) -> Iterable[dict[str, Any]]:
    reply = 0
    for turn in turns:
        reply += turn.role == "agent"
        titles = {"task": "Task", "agent": f"Agent, reply {reply}", "tool": "Environment"}
        body = Markup("").join(map(_piece, turn.pieces))
        yield {
            "role": turn.role,
            "title": titles[turn.role],
            "tokens": turn.tokens,
            "origin": turn.origin,
            "body": body,
        }


def _piece(piece: Piece) -> Markup:
    text = escape(visible(piece.text))
    if not piece.text:
        return text
    kinds = [*(["sp"] if piece.special else []), *(["unsure"] if piece.origin and piece.probability < UNSURE else [])]
    named = Markup(' class="{}"').format(" ".join(kinds)) if kinds else Markup("")
    if piece.origin:
        return Markup('<span{} title="{} · probability {}">{}</span>').format(
            named, piece.origin, f"{piece.probability:.3g}", text
        )
    return Markup("<span{}>{}</span>").format(named, text) if kinds else text


def _patch(patch: str) -> Markup:
    lines = []
    for line in visible(patch).split("\n"):
        kind = "hunk" if line.startswith(("@@", "---", "+++", "diff ")) else {"+": "add", "-": "del"}.get(line[:1], "")
        lines.append(Markup('<span class="{}">{}</span>').format(kind, line) if kind else escape(line))
    return Markup("\n").join(lines)
