"""The records that describe a buffer to the compiled functions in this folder."""

import numpy as np

_NUMBERS = "row_bytes", "steps", "lanes", "leaves"
_ADDRESSES = (
    *("rows", "extents", "sources", "counts", "revision", "head"),
    *("priorities", "alpha", "weighed_alpha", "largest", "episodes", "loops", "goes_on"),
)
#: For writes: the shape of the rows (``lanes`` is 0 for ``[T]``), and addresses (0 for none). ``priorities`` points to
#: ``SumTree.addresses`` or ``ChunkedOrder.addresses``, ``episodes`` to an ``EPISODES`` record, ``alpha`` to the
#: exponent of a sum tree, and ``weighed_alpha`` to the exponent of the stored weights. ``head`` points to the block of
#: a ring, see :mod:`rlbuf_td.kernels.serials`, and ``counts`` to the numbers of a writer: the slot of the next row, the
#: write count, and two of a :class:`~rlbuf_td.storages.shared.memory.Planned`. If ``goes_on`` is not 0, the caller ends
#: the write, because listeners without compiled form follow.
RING = np.dtype([(name, np.int64) for name in _NUMBERS + _ADDRESSES] + [("eps", np.float64)])
_SOURCES = (
    *("rows", "extents", "count", "reads", "table", "flat", "uniform", "queue", "serials", "generations"),
    *("windows", "loops", "anchors", "drawn", "weighed_alpha", "largest", "head"),
)
#: For batches of ``count`` rows: the same shape, and addresses. ``reads`` is 0 if another function reads the drawn
#: rows, whose indices are then at ``flat``; else 1. ``table`` points to ``addresses`` as ``priorities`` does, ``flat``
#: and ``uniform`` to scratch memory for ``count`` int64 and float64, and ``queue`` to the memory of a ``FreshQueue``
#: (0: none). ``serials`` points to the numbers of a ring, and ``generations`` to the serial of each row if rows are out
#: of order (0: serials follow from cells). ``windows`` points to a ``WINDOWS`` record if the drawn rows are expanded to
#: windows. ``anchors`` points to the ``drawn`` rows of a sampler, each of which wrappers expand to ``count / drawn``
#: rows. ``loops`` points to ``rlbuf_td.kernels.batch.parallel_loops()`` if batches are large.
#: Updates raise the number at ``largest``, and of a sum tree need ``weighed_alpha`` and ``eps``, as in ``RING``; draws
#: by rank need ``alpha``, ``shift`` and ``head`` of :class:`rlbuf_td.kernels.rank_order.law.Ranks`.
BATCH = np.dtype(
    [(name, np.int64) for name in (*_NUMBERS, *_SOURCES)] + [(name, np.float64) for name in ("eps", "alpha", "shift")]
)

_OF_WINDOWS = (
    *("count", "length", "burn_in", "shifts", "bounds", "flags", "widths", "reports", "scratch"),
    *("across", "adds_init", "stamp", "mask", "burn_in_mask"),
)
#: For ``count`` windows of ``burn_in + length`` rows around the rows at ``BATCH.anchors``; ``shifts`` is 1 if windows
#: may begin earlier. ``bounds`` points to scratch memory, ``[count, 2]`` int64, for the places of the first and the
#: last row of the trajectory in each window, ``flags`` to the leaf numbers and sizes of the flags "is_init", truncated
#: and done, ``[3, 2]`` int64 (size 0: not stored), and ``widths`` to the bytes per element of the sampler's
#: ``reports``. ``across`` is 1 if windows go on across the ends of episodes; ``adds_init`` is 1 if the rows then
#: have no flag "is_init".
#: ``stamp`` is the place of the stamps among the reports (-1: none).
#: An update of priorities reads the masks of a batch at ``mask`` and ``burn_in_mask``, weights the largest
#: TD error of a window by ``eta`` and the mean by ``1 - eta``, raises the result to at least ``least``, and writes to
#: ``scratch``, ``[4, count]`` int64.
WINDOWS = np.dtype([(name, np.int64) for name in _OF_WINDOWS] + [("eta", np.float64), ("least", np.float64)])

#: For n-step transitions: ``taken`` and ``ends`` are addresses, of one int64 per row, for the number of steps of each
#: transition and for its last row.
STEPS = np.dtype([("n", np.int64), ("gamma", np.float64), ("taken", np.int64), ("ends", np.int64)])
