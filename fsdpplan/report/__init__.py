"""The report: a plan, and what came of it, as one page to hand over.

    values      what a report is made of: sections of facts, words, tables, notes and charts
    page        those as one HTML file
    summary, ...  a section each, as a pure function of what it is about
    of_plan     which sections a plan has, in their order
    assets/     the page's template, style and scripts, and Apache ECharts as it is published

To add a section: write `def name_section(plan, ...) -> Section | None` (None: there is nothing to
show) in a module of this room, and name it in `of_plan`. Say everything in words and tables too: a
chart's `says` is what is read aloud, its `table` has its numbers. A chart takes one of the kinds
that `assets/charts.js` draws by ECharts:

    bars    {unit, categories, series: [{name, values}], limits: [{name, value}]}: lying bars,
            stacked, or `beside` each other; one bar a category
    tornado {unit, categories, series: [{name, values}], details}: bars to both sides of 0
    intervals {unit, rows: [{name, lower, expected, upper, measured, details}], marks}: bands
    lines   {x: {name, unit, log}, y: {name, unit, log}, series: [{name, points: [[x, y]], band:
            [[x, lower, upper]], area, step}], marks: [{axis, value, name}]}; an area series stacks
    points  {x, y, series: [{name, points: [{x, y, lower, upper, name, details}]}], marks}
    spans   {unit, tick, lanes: [name], kinds: [name], colors, names, spans: [[lane, start, length,
            kind, name, micro-batch, stage]]}: what is done when, in whole ticks
    held    {x, y, tick, scale, at: [tick], series: [{name, values}]}: what is held when, stacked
    topology {gpus, perNode, axes, ...}: `network.topology_data`, drawn by `assets/topology.js`

Data of several drawings of which one is shown are `{choices: [{name, ...}], chosen}`.

Another kind is one function there, `kinds.NAME = function (data, look) { return option }`, with
colours and fonts taken from `look`, so that it is right in the dark and on paper. Numbers are
written by `written(number, unit)`, in Python and in JavaScript alike.
"""
