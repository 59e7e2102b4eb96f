"""Pages of runs for tests of what is made of them."""

from __future__ import annotations

import math

from peer.extras.site.run_page import Day, Latest, News, Point, Row, RunPage

RUN, OTHER = "5f" * 32, "ab" * 32
LINK = f"shoal://{RUN}?seed=/dns4/keeper.example.org/tcp/7700/p2p/12D3KooWBhvxmvKvTYGJvXjvCXKKGPPzhXYSBNWcTcDnkDwVQSSd"
NOW = 1_790_000_000.0
BAD = "<img src=x onerror=\"document.title='broken'\">"


def points(count: int, low: float) -> tuple[Point, ...]:
    return tuple(
        Point(
            at=NOW - 600.0 * (count - n),
            tokens=10**6 * (n - n % 4),
            loss=low + 3 * math.exp(-n / 60),
        )
        for n in range(count)
    )


def a_page(**changes: object) -> RunPage:
    """A run of some days that goes on."""
    fields: dict[str, object] = {
        "run": RUN,
        "at": NOW,
        "name": "tiny-stories-124m",
        "description": "A small model of English stories, trained by anybody who likes to help.\n"
        f"Second line of text. {BAD}",
        "licence": "apache-2.0",
        "homepage": "https://example.org/tiny-stories",
        "contact": "ada@example.org",
        "discussion": "javascript:alert(1)",
        "model": "gpt, 124 M parameters",
        "data": "roneneldan/TinyStories at f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
        "link": LINK,
        "tokens": 399_000_000,
        "tokens_goal": 10**9,
        "learners": 23,
        "keepers": 2,
        "others": 3,
        "contributors_total": 57,
        "losses": points(400, 2.1),
        "held_out": points(400, 2.2)[::40],
        "days": tuple(
            Day(date=f"2026-11-{day:02}", tokens=10**7 * (3 + day % 5)) for day in range(1, 24)
        ),
        "contributors": (
            Row(name="Ada of the Alps", tokens=150_000_000, share=0.376),
            Row(name="a" * 40, tokens=99_000_000, share=0.248),
            Row(name=BAD, tokens=50_000_000, share=0.125),
            Row(name="54 others", tokens=100_000_000, share=0.251),
        ),
        "latest": Latest(
            name="2026-11-23T080000Z-3f9a1c2b4d5e6f70",
            tokens=398_000_000,
            at=NOW - 3000,
            size_bytes=248_000_000,
            loss=2.2134,
            loss_tokens=396_000_000,
            path="exports/2026-11-23T080000Z-3f9a1c2b4d5e6f70/model.safetensors",
            url="https://huggingface.co/ada/tiny-stories-124m",
        ),
        "news": tuple(
            News(at=NOW - 700 * n, text=f"held-out loss {2.2 + n / 50:.4f} at {399 - n} M tokens")
            for n in range(12)
        ),
    }
    return RunPage(**{**fields, **changes})  # type: ignore[arg-type]
