"""Plots of buffers, episodes and rollouts, as matplotlib figures.

Each function returns a figure that is 3.4 inches wide, like a column of a paper. Jupyter shows the figure as the result
of a cell; elsewhere, call ``figure.savefig``. ``pip install 'rlbuf_td[demo]'`` installs matplotlib.
"""

from rlbuf_td.diagnostics.plots.episodes import plot_advantages, plot_episodes, plot_trajectory
from rlbuf_td.diagnostics.plots.health import plot_health, plot_priorities

__all__ = ["plot_advantages", "plot_episodes", "plot_health", "plot_priorities", "plot_trajectory"]
