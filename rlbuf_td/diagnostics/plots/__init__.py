"""Plots of buffers, episodes and rollouts, as matplotlib figures.

Each function returns a ``matplotlib.figure.Figure`` of the width of a paper's column (3.4 in). Jupyter shows it as the
result of a cell; elsewhere call ``figure.savefig``. Lines and shades also differ in greyscale. Pyplot's global
state stays unchanged. To install matplotlib: ``pip install 'rlbuf_td[demo]'``.
"""

from rlbuf_td.diagnostics.plots.episodes import plot_advantages, plot_episodes, plot_trajectory
from rlbuf_td.diagnostics.plots.health import plot_health, plot_priorities

__all__ = ["plot_advantages", "plot_episodes", "plot_health", "plot_priorities", "plot_trajectory"]
