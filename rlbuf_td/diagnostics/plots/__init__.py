"""Plots of buffers, episodes and rollouts, as matplotlib figures.

Each function returns a ``matplotlib.figure.Figure`` as wide as a column of a paper (3.4 in), which Jupyter shows as a
cell's result; elsewhere call ``figure.savefig``. Lines and shades differ in grey too. Pyplot's global state is not
used. matplotlib comes with ``pip install 'rlbuf_td[demo]'``.
"""

from rlbuf_td.diagnostics.plots.episodes import plot_advantages, plot_episodes, plot_trajectory
from rlbuf_td.diagnostics.plots.health import plot_health, plot_priorities

__all__ = ["plot_advantages", "plot_episodes", "plot_health", "plot_priorities", "plot_trajectory"]
