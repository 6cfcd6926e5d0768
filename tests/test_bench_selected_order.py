"""The selected order against sorting everything: on a GPU, else interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rlbuf_td.cli.bench import selected_order
from rlbuf_td.cli.bench.selected_order import SelectedOrder, selecting
from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.rank_order import LARGEST
from rlbuf_td.kernels.rank_order.law import rank_law
from rlbuf_td.kernels.rank_order.sorted import SortedOrder
from rlbuf_td.kernels.strata import masses
from tests.kernels.orders import empty

MAGNITUDES: dict[str, Callable[[int], torch.Tensor]] = {
    "random": torch.rand,
    "all equal": torch.ones,
    "few": lambda n: torch.randint(3, (n,)).float(),
    "a tie at the top": lambda n: torch.rand(n).where(torch.rand(n) < 0.5, 1.0 - 2.0 * (torch.rand(n) < 0.2)),
    "neighbours": lambda n: (0x3F800000 + torch.arange(n, dtype=torch.int32) % 3 * 100).view(torch.float32),
    "many sizes": lambda n: torch.exp(30 * torch.randn(n)).clamp(max=LARGEST),
    "extremes": lambda n: torch.tensor([0.0, -0.0, 1e-45, 1e-38, 1e30, LARGEST])[torch.randint(6, (n,))],
    "rows without": lambda n: torch.rand(n).where(torch.rand(n) < 0.2, -1.0),
}


@pytest.fixture(autouse=True)
def on_the_gpus_path(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    with forced("triton"):
        monkeypatch.setattr(selecting(), "_SIZE", 256)  # small orders take several programs
        yield


def lockstep(order: SelectedOrder, twin: SortedOrder, batch: int, alpha: float = 0.3, **given: object) -> None:
    """Draw from both and compare."""
    uniform, device = torch.rand(batch, dtype=torch.float64), order.magnitude.device
    options = {"stratified": True, "beta": 0.4, "norm": "buffer"} | given
    mine = order.draw(rank_law(alpha, device), uniform.to(device), **options)  # type: ignore[arg-type]
    with forced("torch"):
        theirs = twin.draw(rank_law(alpha), uniform, **options)  # type: ignore[arg-type]
    assert mine is not None
    assert theirs is not None
    assert torch.equal(mine[0].cpu(), theirs[0])
    torch.testing.assert_close(mine[1].cpu(), theirs[1])
    order.check_valid()


@pytest.mark.parametrize("kind", MAGNITUDES)
def test_draws_are_those_of_sorting(gpu, kind):
    for capacity, batch in ((1, 3), (9, 16), (1_000, 20), (5_003, 1), (5_003, 32)):
        magnitude = MAGNITUDES[kind](capacity)
        magnitude[0] = 0.5  # there is a row
        lockstep(SelectedOrder(magnitude.to(gpu)), SortedOrder(magnitude.clone()), batch)


@pytest.mark.parametrize(("kind", "rows"), [("random", 100), ("neighbours", 64), ("neighbours", 65)])
def test_every_rank_is_found_where_all_are_wanted(gpu, kind, rows):
    magnitude = MAGNITUDES[kind](rows)  # neighbours share all but their last digit: they fill a list, or do not fit
    order, uniform = SelectedOrder(magnitude.to(gpu)), torch.full((rows,), 0.5, dtype=torch.float64, device=gpu)
    drawn = order.draw(rank_law(0.0, gpu), uniform, stratified=True, beta=0.4, norm=None)
    assert drawn is not None
    ranks = masses(uniform.cpu(), torch.tensor(rows), stratified=True).long()
    assert len(ranks.unique()) == rows
    assert torch.equal(drawn[0].cpu(), magnitude.sort(descending=True, stable=True).indices[ranks])


def test_ties_of_many_rows_are_found_through_several_chunks(gpu):
    magnitude = MAGNITUDES["neighbours"](20_000)
    block, bins = selecting().digits_of_rows(20_000)
    assert min(2**block, bins) > selecting()._CHUNK
    lockstep(SelectedOrder(magnitude.to(gpu)), SortedOrder(magnitude.clone()), 64)


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize(("norm", "batch"), [("buffer", 7), ("batch", 64), (None, 7)])
def test_weights_are_those_of_the_specification(gpu, stratified, norm, batch):
    magnitude = torch.rand(700)
    order, twin = SelectedOrder(magnitude.to(gpu)), SortedOrder(magnitude.clone())
    lockstep(order, twin, batch, 0.7, stratified=stratified, norm=norm)


def test_a_rank_may_be_wanted_more_than_once(gpu):
    magnitude = MAGNITUDES["few"](90)
    lockstep(SelectedOrder(magnitude.to(gpu)), SortedOrder(magnitude.clone()), 300, 0.7)


def test_draws_follow_what_changes(gpu):
    order, twin = SelectedOrder(empty(600, gpu)), SortedOrder(empty(600))

    def both(change: str, *given: object) -> None:
        getattr(order, change)(*(x.to(gpu) if isinstance(x, torch.Tensor) else x for x in given))
        with forced("torch"):
            getattr(twin, change)(*given)
        assert torch.equal(order.magnitude.cpu(), twin.magnitude)
        assert int(order.count()) == int((twin.magnitude >= 0).sum())
        lockstep(order, twin, 12)

    for start in range(0, 600, 150):
        both("fill_", start, 100, 1.0 + start)
        td_error = torch.randn(90)
        td_error[::17] = torch.nan
        both("update_", torch.randint(-1, 601, (90,)), td_error, 600)
        both("fill_", start + 20, 70, torch.tensor(0.5, dtype=torch.float64))
    both("assign_", MAGNITUDES["rows without"](600))
    every = torch.arange(600)
    both("update_", every, torch.zeros(600), 600)
    both("update_", every[:70], torch.ones(70), 600)
    assert int(order.refused) == 4 * 6
    assert torch.equal(order.ranks_of(every.to(gpu)).cpu(), every + 1)


def test_an_empty_order_draws_a_row_that_there_is(gpu):
    order, uniform = SelectedOrder(empty(3, gpu)), torch.rand(5, dtype=torch.float64, device=gpu)
    drawn = order.draw(rank_law(0.7, gpu), uniform, stratified=True, beta=0.4, norm=None)
    assert drawn is not None
    assert drawn[0].tolist() == [0] * 5
    order.check_valid()


def test_more_ranks_than_are_selected_are_sorted_for(gpu, monkeypatch):
    monkeypatch.setattr(selected_order, "MOST", 8)
    order, twin = SelectedOrder(torch.rand(50, device=gpu)), SortedOrder(empty(50))
    twin.assign_(order.magnitude.cpu())
    lockstep(order, twin, 8)
    monkeypatch.setattr(selecting(), "draw", None)
    for batch in (0, 9):
        lockstep(order, twin, batch)
        order.update_(torch.arange(5, device=gpu), torch.rand(5, device=gpu), 50)
        twin.assign_(order.magnitude.cpu())


def test_a_draw_that_was_interrupted_leaves_nothing_behind(gpu, monkeypatch):
    magnitude = torch.rand(100)
    order, twin = SelectedOrder(magnitude.to(gpu)), SortedOrder(magnitude.clone())

    class Interrupted:
        def __getitem__(self, grid: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(selecting(), "_finish", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            lockstep(order, twin, 4)
    with pytest.raises(AssertionError, match="have not been cleared"):
        order.check_valid()
    lockstep(order, twin, 4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_draw_from_what_there_is(gpu):
    order, twin, law = SelectedOrder(torch.rand(4_000, device=gpu)), SortedOrder(empty(4_000)), rank_law(0.7, gpu)
    index, td_error = torch.randint(4_000, (256,), device=gpu), torch.rand(256, device=gpu)
    uniform = torch.rand(32, dtype=torch.float64, device=gpu)

    def step() -> torch.Tensor:
        order.update_(index, td_error, 4_000)
        return (order.draw(law, uniform, stratified=True, beta=0.4, norm="buffer") or [index])[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = step()
    for start in range(0, 600, 100):
        index.random_(0, 4_000)
        uniform.uniform_()
        order.fill_(start, 90, 0.5)
        order.on_device.take(law, 0.4)  # as a sampler does before a replay: draws between them have another law
        graph.replay()
        twin.assign_(order.magnitude.cpu())
        with forced("torch"):
            given = rank_law(0.7), uniform.cpu()
            expected = twin.draw(*given, stratified=True, beta=0.4, norm="buffer") or pytest.fail("nothing to draw")
        assert torch.equal(drawn.cpu(), expected[0])
        lockstep(order, twin, 30)
