"""Pictures of buffers, episodes and rollouts, as matplotlib figures.

Each function returns a ``matplotlib.figure.Figure`` as wide as a column of a paper (3.4 in) and shows nothing: in
Jupyter it is shown as what a cell returns, elsewhere call ``figure.savefig``. Lines and shades differ in grey, too.
Pyplot and its global state are not touched. matplotlib comes with ``pip install 'rlbuf_td[demo]'``.
"""

from rlbuf_td.diagnostics.plots.advantages import plot_advantages
from rlbuf_td.diagnostics.plots.episodes import plot_episodes
from rlbuf_td.diagnostics.plots.health import plot_health
from rlbuf_td.diagnostics.plots.priorities import plot_priorities
from rlbuf_td.diagnostics.plots.trajectory import plot_trajectory

__all__ = ["plot_advantages", "plot_episodes", "plot_health", "plot_priorities", "plot_trajectory"]
