"""A buffer in Jupyter."""

from __future__ import annotations

from html.parser import HTMLParser

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage
from torchrl.envs import RewardScaling

from rlbuf_td import EpisodeStats, PackedStorage, ProportionalSampler, ReplayBuffer, RolloutBuffer

DATA = TensorDict(
    {"pixels": torch.zeros(6, 4, 8, 8, dtype=torch.uint8), "next": {"reward": torch.zeros(6, 1), "x<y": torch.ones(6)}},
    [6],
)


class Balanced(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_it_shows_keys_fill_and_settings_whatever_the_storage():
    for storage in (PackedStorage(8), LazyTensorStorage(8)):
        rb = ReplayBuffer(
            storage=storage,
            sampler=ProportionalSampler(8, alpha=0.25),
            transform=RewardScaling(0.0, 2.0),
            batch_size=3,
            stats=EpisodeStats(done_key="done"),
        )
        rb.extend(DATA.clone().set("done", torch.ones(6, dtype=torch.bool)))
        words = Balanced(rb._repr_html_()).words
        text = " ".join(words)
        for expected in ("6 of 8 rows, 75%", "alpha=0.25", "RewardScaling", "EpisodeStats", type(storage).__name__):
            assert expected in text
        at = words.index("pixels")
        assert words[at : at + 4] == ["pixels", "uint8", "4 × 8 × 8", "256"]
        at = words.index("next.x<y")
        assert words[at + 1 : at + 4] == ["float32", "scalar", "4"]
        assert "width:75.00%" in rb._repr_html_()


def test_html_escapes_text(tmp_path):
    storage = PackedStorage(8, scratch_dir=tmp_path / "<script>")
    rb = ReplayBuffer(storage=storage)
    rb.extend(DATA)
    html = rb._repr_html_()
    assert "<script" not in html
    assert any(f"mapped file in {storage.scratch_dir}" in words for words in Balanced(html).words)


def test_buffers_of_nothing_have_a_picture_too():
    for rb in (ReplayBuffer(), RolloutBuffer(4, 2), ReplayBuffer(storage=ListStorage(5))):
        assert "no keys yet" in " ".join(Balanced(rb._repr_html_()).words)
    assert "not initialized" in ReplayBuffer(storage=PackedStorage(4), delayed_init=True)._repr_html_()
