"""Self-contained pages: text, tables, key figures and plots in one HTML file that opens offline."""

from lezero.report.bars import Bar, BarPlot
from lezero.report.lines import Level, LinePlot, Mark, Series
from lezero.report.markup import Markup, plain, tag
from lezero.report.page import Page, Section, Tile

__all__ = [
    "Bar",
    "BarPlot",
    "Level",
    "LinePlot",
    "Mark",
    "Markup",
    "Page",
    "Section",
    "Series",
    "Tile",
    "plain",
    "tag",
]
