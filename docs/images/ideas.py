"""Draws the pictures of docs/ten_minutes.md, one for each idea: `docs/images/ideas.py`.

A picture is an SVG with the colours of both schemes, narrow enough for a phone. It shows what is true of any run, and
no measurement.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH = 480
STYLE = """
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2937; text-anchor: middle }
.small { font-size: 12px } .left { text-anchor: start } .end { text-anchor: end }
.muted { fill: #5b6472 } .bold { font-weight: bold }
.box { stroke-width: 1.5; rx: 6px } .arrow { stroke: #5b6472; stroke-width: 1.5; fill: none; marker-end: url(#head) }
.head { fill: #5b6472 } .line { stroke: #5b6472; stroke-width: 1; stroke-dasharray: 4 3 }
.trainer { fill: #dbeafe; stroke: #2563eb } .server { fill: #dcfce7; stroke: #16a34a }
.buffer { fill: #fef3c7; stroke: #d97706 } .plain { fill: #f3f4f6; stroke: #8b94a1 }
.idle { fill: none; stroke: #8b94a1; stroke-dasharray: 3 3 } .bad { fill: #fee2e2; stroke: #dc2626 }
@media (prefers-color-scheme: dark) {
text { fill: #e5e7eb } .muted { fill: #aab2bf } .arrow, .line { stroke: #aab2bf } .head { fill: #aab2bf }
.trainer { fill: #17345c; stroke: #60a5fa } .server { fill: #123f24; stroke: #4ade80 }
.buffer { fill: #4a3510; stroke: #fbbf24 } .plain { fill: #2a3038; stroke: #8b94a1 }
.bad { fill: #561c1c; stroke: #f87171 }
}
""".strip()


class Picture:
    """An SVG of a title, for readers who do not see it, and shapes at pixels from its top left corner."""

    def __init__(self, title: str, height: int) -> None:
        self.title = title
        self.height = height
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, cls: str = "") -> None:
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" class="{cls}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, cls: str, *lines: str, small: bool = False) -> None:
        """A box with lines of text in its middle."""
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="box {cls}"/>')
        step = 15 if small else 18
        top = y + height / 2 - step * (len(lines) - 1) / 2 + (4 if small else 5)
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + step * number, line, "small" if small else "")

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._shapes.append(f'<path d="M{path}" class="arrow"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._shapes.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="line"/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>\n{STYLE}\n</style>",
                f'<defs>{head}<path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>',
                *self._shapes,
                "</svg>\n",
            )
        )


def loop() -> Picture:
    picture = Picture("The loop: prompts, responses, rewards, a training step, new weights", 250)
    picture.box(20, 20, 150, 62, "server", "SGLang servers", "write responses")
    picture.box(310, 20, 150, 62, "plain", "your reward", "scores them")
    picture.box(310, 160, 150, 62, "trainer", "Megatron ranks", "train a step")
    picture.box(20, 160, 150, 62, "plain", "weight sync", "makes a version")
    picture.arrow((170, 51), (306, 51))
    picture.arrow((385, 82), (385, 156))
    picture.arrow((310, 191), (174, 191))
    picture.arrow((95, 160), (95, 86))
    picture.text(240, 40, "several a prompt", "small muted")
    picture.text(376, 124, "responses and rewards", "small muted end")
    picture.text(240, 210, "new weights", "small muted")
    picture.text(240, 241, "prompts come from your rows; good responses become likelier", "small muted")
    return picture


def asynchrony() -> Picture:
    picture = Picture("Time of servers and trainer, one after the other and side by side", 280)
    for top, title in ((0, "in turns"), (140, "asynchronous")):
        picture.text(12, top + 22, title, "bold left")
        picture.text(12, top + 57, "servers", "small left")
        picture.text(12, top + 97, "trainer", "small left")
    for x, width, number in ((70, 130, 1), (270, 130, 2)):
        picture.box(x, 36, width, 32, "server", f"batch {number}")
        picture.box(x + width, 36, 70 if number == 1 else 68, 32, "idle", "waits", small=True)
        picture.box(x, 76, width, 32, "idle", "waits", small=True)
        picture.box(x + width, 76, 70 if number == 1 else 68, 32, "trainer", f"step {number}")
    for number, (x, width) in enumerate(((70, 130), (200, 130), (330, 138)), 1):
        picture.box(x, 176, width, 32, "server", f"batch {number}")
    picture.box(70, 216, 130, 32, "idle", "first batch", small=True)
    picture.box(200, 216, 70, 32, "trainer", "step 1")
    picture.box(270, 216, 60, 32, "idle")
    picture.box(330, 216, 70, 32, "trainer", "step 2")
    picture.box(400, 216, 68, 32, "idle")
    picture.line(12, 126, 468, 126)
    picture.text(240, 271, "time →   the next batch is written while one is trained", "small muted")
    return picture


def versions() -> Picture:
    picture = Picture("The tokens of a response carry the versions that sampled them", 190)
    picture.text(12, 20, "one response, token by token", "left bold")
    kinds = ("plain",) * 3 + ("buffer",) * 4 + ("server",) * 3
    labels = ("4",) * 3 + ("5",) * 4 + ("6",) * 3
    for number, (kind, label) in enumerate(zip(kinds, labels, strict=True)):
        picture.box(12 + 45 * number, 34, 41, 36, kind, label)
    picture.text(77, 90, "sampled by version 4", "small muted")
    picture.text(235, 90, "a sync, then version 5", "small muted")
    picture.text(393, 90, "version 6", "small muted")
    picture.box(300, 112, 168, 40, "trainer", "trained at version 6")
    picture.arrow((33, 100), (33, 132), (296, 132))
    picture.text(165, 125, "staleness 2", "bold")
    picture.text(240, 178, "too old for the bound? made again, masked or dropped", "small muted")
    return picture


def buffer() -> Picture:
    picture = Picture("The buffer has a fixed number of slots for groups", 250)
    picture.box(12, 20, 110, 50, "plain", "prompts")
    picture.arrow((122, 45), (148, 45))
    picture.text(66, 92, "a prompt needs", "small muted")
    picture.text(66, 107, "a free slot", "small muted")
    states = (
        *(("trainer", "in a step"),) * 2,
        *(("buffer", "finished"),) * 2,
        ("server", "generating"),
        *(("buffer", "finished"),),
        *(("server", "generating"),) * 2,
    )
    for number, (kind, label) in enumerate(states):
        picture.box(152 + 80 * (number % 4), 20 + 58 * (number // 4), 76, 50, kind, label, small=True)
    picture.text(320, 150, "oldest first, up to a small window", "small muted")
    picture.arrow((190, 130), (190, 176))
    picture.box(152, 180, 156, 44, "trainer", "the next batch")
    picture.arrow((308, 202), (346, 202))
    picture.text(412, 199, "published:", "small muted")
    picture.text(412, 214, "slots are free", "small muted")
    picture.text(240, 243, "no call is answered before its change is recorded", "small muted")
    return picture


def pools() -> Picture:
    picture = Picture("Pools of devices: trainer ranks, and servers behind a router", 230)
    picture.box(12, 30, 215, 150, "idle")
    picture.box(253, 30, 215, 150, "idle")
    picture.text(120, 22, "trainer pool", "bold")
    picture.text(360, 22, "rollout pool", "bold")
    for number in range(4):
        picture.box(
            26 + 98 * (number % 2), 46 + 62 * (number // 2), 90, 52, "trainer", f"rank {number}", "GPU", small=True
        )
    picture.box(267, 44, 187, 32, "plain", "router")
    for number in range(2):
        x = 267 + 98 * number
        picture.arrow((x + 44, 76), (x + 44, 92))
        picture.box(x, 96, 89, 70, "server", f"server {number}", "2 GPUs", small=True)
    picture.arrow((227, 140), (249, 140))
    picture.text(240, 200, "the driver, one process, tells all of them what to do", "small muted")
    picture.text(240, 219, "megasync plan draws the pools of your configuration", "small muted")
    return picture


def sync() -> Picture:
    picture = Picture("Each trainer rank sends its shards to the server ranks that hold them", 290)
    for number in range(2):
        picture.box(12, 30 + 62 * number, 140, 50, "trainer", f"trainer rank {number}")
        picture.box(328, 30 + 62 * number, 140, 50, "server", f"server rank {number}")
    picture.arrow((152, 48), (324, 48))
    picture.arrow((152, 60), (324, 104))
    picture.arrow((152, 110), (324, 66))
    picture.arrow((152, 124), (324, 124))
    picture.text(240, 38, "only the rectangles it holds", "small muted")
    picture.text(12, 178, "a server during a sync", "left bold")
    picture.box(12, 190, 140, 36, "server", "generates", small=True)
    picture.box(152, 190, 190, 36, "server", "generates and receives", small=True)
    picture.box(342, 190, 50, 36, "bad", "pause", small=True)
    picture.box(392, 190, 76, 36, "server", "generates", small=True)
    picture.text(370, 245, "digests agree: swap, new version", "small muted")
    picture.text(240, 277, "running requests go on with the new weights", "small muted")
    return picture


def failures() -> Picture:
    picture = Picture("A server dies, and its request continues on another one", 240)
    picture.box(12, 24, 120, 44, "bad", "server 0 dies")
    picture.box(12, 130, 120, 44, "server", "server 1")
    picture.text(160, 24, "tokens so far", "small muted left")
    for number in range(5):
        picture.box(160 + 32 * number, 32, 28, 28, "plain")
    picture.arrow((236, 66), (236, 134))
    picture.text(246, 104, "they are kept", "small muted left")
    for number in range(9):
        picture.box(160 + 32 * number, 138, 28, 28, "plain" if number < 5 else "server")
    picture.text(384, 186, "the rest", "small muted")
    picture.text(240, 215, "a rank or the driver dies? back to the checkpoint and the ledger:", "small muted")
    picture.text(240, 232, "every prompt is trained once, or dropped with a reason", "small muted")
    return picture


def yours() -> Picture:
    picture = Picture("What you write: rows, a reward, and perhaps a rollout", 230)
    picture.box(12, 20, 140, 50, "plain", "rows", "prompt, answer, …", small=True)
    picture.box(12, 84, 140, 50, "plain", "reward", "a function, or built in", small=True)
    picture.box(12, 148, 140, 50, "plain", "rollout (optional)", "turns, tools, agents", small=True)
    for y in (45, 109, 173):
        picture.arrow((152, y), (186, 109 if y == 109 else y), (206, 109 if y == 109 else 109 + (y - 109) / 4))
    picture.box(210, 78, 110, 62, "trainer", "one YAML", "megasync train", small=True)
    picture.arrow((320, 109), (350, 109))
    picture.box(
        354,
        48,
        114,
        122,
        "buffer",
        "a run folder:",
        "curve, metrics,",
        "samples,",
        "checkpoints,",
        "a model",
        small=True,
    )
    picture.text(240, 220, "everything else has a default", "small muted")
    return picture


PICTURES = (loop, asynchrony, versions, buffer, pools, sync, failures, yours)

if __name__ == "__main__":
    for drawn in PICTURES:
        (Path(__file__).parent / f"idea_{drawn.__name__}.svg").write_text(drawn().svg(), encoding="utf-8")
