"""A streaming PyTorch data loader: micro-batches of the columns that a stage names, as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch.utils.data import DataLoader, IterableDataset

from spmd_rl.data.batch import Batch


class Experience(IterableDataset[Batch]):
    """portions: called for every pass, gives batches as they become ready; columns: those that are wanted of them."""

    def __init__(self, portions: Callable[[], Iterable[Batch]], columns: Sequence[str]) -> None:
        super().__init__()
        self._portions, self._columns = portions, tuple(columns)

    def __iter__(self) -> Iterator[Batch]:
        for portion in self._portions():
            yield portion.only(self._columns)


def stream_loader(portions: Callable[[], Iterable[Batch]], columns: Sequence[str]) -> DataLoader[Batch]:
    """A loader over one step (or whatever `portions` goes through), for a loop such as

        for batch in stream_loader(lambda: (p.batch for p in consumer.portions(step, ...)), ["prompt", "response"]):

    Batches are formed by the stream, not by the loader, and stay in this process: the store is here. Raises KeyError
    for a column that the stream does not carry.
    """
    return DataLoader(Experience(portions, columns), batch_size=None, num_workers=0)
