"use strict";
// Kinds of charts, each a function from plain numbers to an option of ECharts, and how numbers are
// written: as fsdpplan/units.py does. What else there is to know is in fsdpplan/report/__init__.py.
const charts = (() => {
  // Okabe and Ito, https://jfly.uni-koeln.de/color/: told apart by whoever sees colours otherwise.
  // On dark ground the darkest two are lighter.
  const LIGHT = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a600", "#6b7280", "#a3abb6", "#3c4450"];
  const DARK = ["#3fa2e0", "#f0b440", "#2cc295", "#dc92ba", "#8fd0f5", "#f5813c", "#d9cc3c", "#98a2b0", "#646f80", "#d3dae4"];
  // Beside colours, patterns: what is printed in grey is told apart, too.
  const DECALS = [
    {symbol: "none"},
    {symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 6], rotation: Math.PI / 4},
    {symbol: "circle", symbolSize: 0.7, dashArrayX: [[7, 7], [0, 7, 7, 0]], dashArrayY: [7, 0]},
    {symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 6], rotation: -Math.PI / 4},
    {symbol: "rect", dashArrayX: [1, 0], dashArrayY: [1, 5], rotation: 0},
    {symbol: "rect", dashArrayX: [1, 0], dashArrayY: [1, 5], rotation: Math.PI / 2},
    {symbol: "triangle", symbolSize: 0.8, dashArrayX: [[9, 9], [0, 9, 9, 0]], dashArrayY: [8, 2]},
    {symbol: "none"},
    {symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 6], rotation: Math.PI / 4},
    {symbol: "none"},
  ];

  function significant(value) {
    const size = Math.abs(value);
    if (size >= 99.95) return value.toFixed(0);
    if (size >= 9.995) return value.toFixed(1);
    if (size === 0 || size >= 0.9995) return value.toFixed(2);
    return String(Number(value.toPrecision(3)));
  }
  const grouped = (value, digits) =>
    value.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  // By the first of the scales that a number reaches; what is written as 1,000 of one is 1 of the next.
  function scaled(value, scales, last, digits, lastDigits = digits, reached = 1) {
    for (const [scale, unit] of scales) if (Math.abs(value) >= scale * reached) return digits(value / scale) + unit;
    return lastDigits(value) + last;
  }
  const wholly = (value) => value.toFixed(0);
  const WRITTEN = {
    seconds(value) {
      if (value < 0) return "-" + WRITTEN.seconds(-value);
      if (value === 0) return "0 s";
      for (const [limit, scale, unit] of
        [[1e-3, 1e-6, "us"], [1, 1e-3, "ms"], [120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]]) {
        if (value < limit * 0.9995) return significant(value / scale) + " " + unit;
      }
      return significant(value / 86400) + " days";
    },
    bytes: (value) =>
      scaled(value, [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]], " B", (one) => grouped(one, 1), wholly),
    wire_bytes: (value) =>
      scaled(value, [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"]], " B", significant, wholly),
    fraction: (value) => (value * 100).toFixed(1) + " %",
    count: (value) =>
      scaled(value, [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " K"]], "", significant, significant, 0.9995),
    whole: (value) => grouped(value, 0),
    percent_change: (value) => (value < 0 ? "" : "+") + value.toFixed(3) + " %",
    ratio: (value) => value.toFixed(2),
    plain: (value) => String(Number(value.toPrecision(4))),
    kwh: (value) => scaled(value, [[1e6, " GWh"], [1e3, " MWh"]], " kWh", significant, significant, 0.9995),
    dollars: (value) =>
      value >= 0.9995e9 ? "$" + significant(value / 1e9) + " B"
        : value >= 0.9995e6 ? "$" + significant(value / 1e6) + " M" : "$" + grouped(value, value >= 99.5 ? 0 : 2),
  };
  const written = (value, unit) => WRITTEN[unit](value);

  // On an axis the zeros behind a number say nothing.
  const tick = (value, unit) => written(value, unit).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

  const escapes = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"};
  const escaped = (words) => String(words).replace(/[&<>"']/g, (sign) => escapes[sign]);
  const line = (name, value) =>
    `<div style="display:flex;gap:1.2em;justify-content:space-between"><span>${escaped(name)}</span>` +
    `<b style="font-variant-numeric:tabular-nums">${escaped(value)}</b></div>`;
  const hover = (heading, pairs) =>
    `<div style="max-width:20rem;white-space:normal"><b>${escaped(heading)}</b>` +
    pairs.map(([name, value]) => line(name, value)).join("") + "</div>";

  // What all charts have.
  function base(look) {
    return {
      animation: false,
      aria: {enabled: false},
      textStyle: {fontFamily: look.font, fontSize: 12, color: look.ink},
      color: look.colors,
      tooltip: {
        confine: true, backgroundColor: look.card, borderColor: look.line,
        textStyle: {color: look.ink, fontSize: 12, fontFamily: look.font},
        extraCssText: "box-shadow:0 4px 16px rgba(0,0,0,.16);border-radius:8px;",
      },
    };
  }
  const legend = (look, names) => ({
    type: "plain", data: names, left: 0, right: 0, top: 0, itemWidth: 14, itemHeight: 10, itemGap: 14,
    textStyle: {color: look.ink, fontSize: 12}, inactiveColor: look.line,
  });
  function legendHeight(names, look) {
    let rows = 1, used = 0;
    for (const name of names) {
      const width = 34 + name.length * 6.6;
      if (used + width > look.width && used > 0) { rows += 1; used = 0; }
      used += width;
    }
    return rows * 22 + 8;
  }
  // Ends and steps of an axis that are round in the unit in which they are written.
  function round(most, unit, steps) {
    const scale = unit === "bytes" ? [2 ** 30, 2 ** 20, 2 ** 10].find((one) => most >= one) || 1
      : unit === "seconds" ? (most >= 172800 ? 86400 : most >= 7200 ? 3600 : most >= 120 ? 60 : 1) : 1;
    const wanted = most / scale / steps, power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= wanted * 0.999) * power * scale;
    return {max: Math.ceil(most / step - 1e-9) * step, interval: step};
  }
  // The same of both ends, where nothing says that an axis begins at 0.
  function span(least, most, unit, steps) {
    const {interval} = round(Math.max(most - least, most / 1e6), unit, steps);
    return {min: Math.floor(least / interval + 1e-9) * interval, max: Math.ceil(most / interval - 1e-9) * interval, interval};
  }
  // Of a logarithmic axis the ends with some air, and 1, 2, 5, 10 of the unit between, or what is
  // told to be written.
  function logSpan(least, most, unit, told) {
    const air = told ? 1 : (most / least) ** 0.06;
    const [min, max] = [least / air, most * air];
    const scales = unit === "seconds"
      ? [[1e-6, 0, 1e-3], [1e-3, 1e-3, 1], [1, 1, 120], [60, 120, 7200], [3600, 7200, 172800], [86400, 172800, Infinity]]
      : [[1, 0, Infinity]];
    const ticks = [];
    for (const [scale, from, to] of scales) {
      const begin = Math.max(min, from), end = Math.min(max, to);
      for (let power = Math.floor(Math.log10(begin / scale)); begin < end && 10 ** power * scale <= end; power += 1) {
        for (const one of max / min > 500 ? [1] : [1, 2, 5]) ticks.push(one * 10 ** power * scale);
      }
    }
    const customValues = (told || ticks).filter((one) => one >= min && one <= max);
    return {min, max, customValues};
  }
  const valuesOf = (series, read) => series.flatMap((one) => one.points.map(read));
  // An axis over what is drawn, by what a chart says of it.
  function over(look, axis, values) {
    const own = axisOf(look, axis.unit);
    const least = Math.min(...values), most = Math.max(...values);
    if (axis.log) {
      const {min, max, customValues} = logSpan(least, most, axis.unit, axis.ticks);
      return {type: "log", min, max, ...own, splitLine: {show: false},
        axisLabel: {...own.axisLabel, customValues}, axisTick: {show: true, customValues, lineStyle: {color: look.line}, length: 4}};
    }
    if (axis.unit !== "bytes" || axis.max !== undefined && axis.min !== undefined) {
      return {type: "value", scale: axis.min === undefined, min: axis.min, max: axis.max, ...own};
    }
    const ends = span(axis.min ?? least, axis.max ?? most, axis.unit, look.width < 480 ? 4 : 6);
    return {type: "value", ...ends, ...(axis.max === undefined ? {} : {max: axis.max}), ...own};
  }
  const axisOf = (look, unit) => ({
    axisLabel: {color: look.quiet, fontSize: 11, formatter: (value) => tick(value, unit), hideOverlap: true, alignMaxLabel: "right"},
    axisLine: {show: true, lineStyle: {color: look.line}},
    axisTick: {show: false},
    splitLine: {lineStyle: {color: look.faint}},
    minorSplitLine: {show: false},
  });
  // From 0 to what is drawn, with round steps between.
  const fitting = (look, most, unit, steps) => {
    const own = axisOf(look, unit);
    const {interval} = round(most, unit, steps);
    return {type: "value", min: 0, max: most * 1.01, interval, ...own, axisLine: {show: false}, axisLabel: {...own.axisLabel, showMaxLabel: false}};
  };
  const named = (look, axis, where) => ({
    name: axis.name, nameLocation: "middle", nameGap: where,
    nameTextStyle: {color: look.quiet, fontSize: 12},
  });
  // Above the axis: beside it, it would have to be turned.
  const above = (look, axis) => ({
    name: axis.name, nameLocation: "end", nameGap: 12,
    nameTextStyle: {color: look.quiet, fontSize: 12, align: "left", padding: [0, 0, 0, -24]},
  });
  const colorOf = (look, index) => look.colors[index % look.colors.length];
  const fill = (look, index) => ({
    color: colorOf(look, index),
    decal: {color: look.decal, ...DECALS[index % DECALS.length]},
  });
  const marked = (look, marks) => marks.length === 0 ? undefined : {
    silent: true, symbol: "none", animation: false,
    lineStyle: {color: look.ink, type: "dashed", width: 1.5, opacity: 0.8},
    label: {color: look.ink, fontSize: 11, formatter: "{b}"},
    data: marks.map((one) => one.axis === "y"
      ? {yAxis: one.value, name: one.name, label: {position: "insideEndTop"}}
      : {xAxis: one.value, name: one.name, label: {position: one.side || "end", align: one.align || "center"}}),
  };

  const kinds = {
    // Lying bars, stacked; one bar a category.
    bars(data, look) {
      const names = data.series.map((one) => one.name);
      const many = names.length > 1;
      const top = many ? legendHeight(names, look) : 6;
      const limits = (data.limits || []).map((one) => ({axis: "x", side: "start", value: one.value, name: `${one.name} ${written(one.value, data.unit)}`}));
      const above = limits.length ? 18 : 4;
      const small = look.width < 480;
      const longest = Math.max(...data.categories.map((one) => one.length)) * 7 + 12;
      const label = Math.min(longest, small ? look.width * 0.36 : Math.min(270, look.width * 0.32));
      const long = longest > label;
      const row = data.categories.length > 24 ? 17 : data.categories.length > 12 ? 21 : small && long ? 38 : 30;
      const totals = data.categories.map((_, at) => data.series.reduce((sum, one) => sum + (one.values[at] || 0), 0));
      // A mark at the end of the axis is named to its left.
      const most = Math.max(...totals, ...limits.map((one) => one.value), 1e-12);
      for (const one of limits) one.align = one.value > most * 0.8 ? "right" : "center";
      return {
        height: top + above + data.categories.length * row + 34,
        option: {
          ...base(look),
          legend: many ? legend(look, names) : undefined,
          grid: {left: 4, right: 26, top: top + above, bottom: 6, containLabel: true},
          tooltip: {
            ...base(look).tooltip, trigger: "axis", axisPointer: {type: "shadow"},
            formatter: (rows) => hover(rows[0].name, [
              ...rows.filter((one) => one.value).map((one) => [one.seriesName, written(one.value, data.unit)]),
              ...(many && !data.beside ? [["together", written(rows.reduce((sum, one) => sum + (one.value || 0), 0), data.unit)]] : []),
            ]),
          },
          xAxis: fitting(look, most, data.unit, small ? 3 : 5),
          yAxis: {
            type: "category", data: data.categories, inverse: true,
            axisLabel: {color: look.ink, fontSize: small ? 11 : 12, lineHeight: 13, width: label, overflow: small ? "break" : "truncate",
              interval: data.categories.length > 40 ? "auto" : 0},
            axisLine: {lineStyle: {color: look.line}}, axisTick: {show: false},
          },
          series: data.series.map((one, index) => ({
            type: "bar", stack: data.beside ? undefined : "all", name: one.name, data: one.values, barMaxWidth: 20,
            barCategoryGap: "28%", itemStyle: fill(look, one.color ?? index),
            markLine: index === 0 ? marked(look, limits) : undefined,
          })),
        },
      };
    },

    // Curves over a number, with bands; areas stack.
    lines(data, look) {
      const names = data.series.map((one) => one.name);
      const many = names.length > 1;
      const top = many ? legendHeight(names, look) : 8;
      const marks = data.marks || [];
      const series = [];
      data.series.forEach((one, index) => {
        const color = colorOf(look, one.color ?? index);
        if (one.band) {
          const stack = `band ${index}`;
          const hidden = {type: "line", stack, symbol: "none", silent: true, lineStyle: {opacity: 0}, itemStyle: {color},
            tooltip: {show: false}, stackStrategy: "all", name: one.name, z: 1};
          series.push({...hidden, data: one.band.map(([x, lower]) => [x, lower])});
          series.push({...hidden, data: one.band.map(([x, lower, upper]) => [x, upper - lower]),
            areaStyle: {color, opacity: 0.16}});
        }
        series.push({
          type: "line", name: one.name, data: one.points, step: one.step ? "end" : false,
          symbol: one.points.length > 40 || one.area ? "none" : "circle", symbolSize: 6,
          lineStyle: {color, width: one.area ? 1 : 2, type: one.dashed ? "dashed" : "solid"}, itemStyle: {color},
          stack: one.area ? "areas" : undefined,
          areaStyle: one.area ? {opacity: 0.85, ...fill(look, one.color ?? index)} : undefined,
          emphasis: {disabled: true}, z: 3,
          markLine: index === 0 ? marked(look, marks) : undefined,
        });
      });
      return {
        height: Math.max(260, Math.min(380, look.width * 0.5)) + top,
        option: {
          ...base(look),
          legend: many ? legend(look, names) : undefined,
          grid: {left: 24, right: 22, top: top + 30, bottom: 26, containLabel: true},
          tooltip: {
            ...base(look).tooltip, trigger: "axis",
            formatter: (rows) => {
              const seen = new Map(rows.map((one) => [one.seriesName, one]));
              return hover(`${data.x.name} ${written(rows[0].value[0], data.x.unit)}`,
                [...seen.values()].map((one) => [one.seriesName, written(one.value[1], data.y.unit)]));
            },
          },
          xAxis: {
            ...(data.x.log ? over(look, data.x, valuesOf(data.series, ([x]) => x))
              : {type: "value", min: data.x.min ?? "dataMin", max: data.x.max ?? "dataMax", ...axisOf(look, data.x.unit)}),
            splitLine: {show: false}, ...named(look, data.x, 28)},
          yAxis: {...(data.series.some((one) => one.area) ? {type: "value", min: data.y.min, max: data.y.max, ...axisOf(look, data.y.unit)}
            : over(look, data.y, [...valuesOf(data.series, ([, y]) => y),
            ...data.series.flatMap((one) => (one.band || []).flatMap(([, lower, upper]) => [lower, upper]))])),
            axisLine: {show: false}, ...above(look, data.y)},
          series,
        },
      };
    },

    // Dots, each with a name, details and perhaps a band.
    points(data, look) {
      const names = data.series.map((one) => one.name);
      const many = names.length > 1;
      const top = many ? legendHeight(names, look) : 8;
      const series = [];
      data.series.forEach((one, index) => {
        const color = colorOf(look, one.color ?? index);
        const banded = one.points.filter((point) => point.lower !== undefined);
        if (banded.length) {
          series.push({
            type: "custom", name: one.name, silent: true, z: 1, encode: {x: 0, y: [1, 2]},
            data: banded.map((point) => [point.x, point.lower, point.upper]),
            renderItem(_, api) {
              const [x, low] = api.coord([api.value(0), api.value(1)]);
              const [, high] = api.coord([api.value(0), api.value(2)]);
              return {type: "line", shape: {x1: x, y1: low, x2: x, y2: high}, style: {stroke: color, opacity: 0.35, lineWidth: 1.5}};
            },
          });
        }
        series.push({
          type: "scatter", name: one.name, symbol: ["circle", "diamond", "triangle", "rect"][index % 4],
          symbolSize: one.size ?? 9, itemStyle: {color, opacity: one.faint ? 0.45 : 0.95}, z: one.faint ? 2 : 3,
          data: one.points.map((point) => ({value: [point.x, point.y], point})),
          markLine: index === 0 ? marked(look, data.marks || []) : undefined,
        });
      });
      return {
        height: Math.max(280, Math.min(420, look.width * 0.55)) + top,
        option: {
          ...base(look),
          legend: many ? legend(look, names) : undefined,
          grid: {left: 24, right: 22, top: top + 30, bottom: 26, containLabel: true},
          tooltip: {
            ...base(look).tooltip, trigger: "item",
            formatter: ({data: {point}}) => hover(point.name, [
              [data.x.name, written(point.x, data.x.unit)], [data.y.name, written(point.y, data.y.unit)],
              ...(point.details || []),
            ]),
          },
          xAxis: {...over(look, data.x, valuesOf(data.series, (point) => point.x)), ...named(look, data.x, 28)},
          yAxis: {...over(look, data.y, valuesOf(data.series, (point) => point.y)), axisLine: {show: false}, ...above(look, data.y)},
          series,
        },
      };
    },

    // Bars to both sides of nothing, of one thing more and of it less; the largest first.
    tornado(data, look) {
      const names = data.series.map((one) => one.name);
      const top = legendHeight(names, look);
      return {
        height: top + 8 + data.categories.length * 26 + 34,
        option: {
          ...base(look),
          legend: legend(look, names),
          grid: {left: 4, right: 26, top: top + 8, bottom: 6, containLabel: true},
          tooltip: {
            ...base(look).tooltip, trigger: "axis", axisPointer: {type: "shadow"},
            formatter: (rows) => hover(rows[0].name, [
              ...rows.filter((one) => one.value !== null)
                .map((one) => [one.seriesName, written(one.value, data.unit)]),
              ...((data.details || [])[rows[0].dataIndex] || []),
            ]),
          },
          xAxis: {type: "value", ...axisOf(look, data.unit), axisLine: {show: false}},
          yAxis: {
            type: "category", data: data.categories, inverse: true, axisTick: {show: false},
            axisLabel: {color: look.ink, fontSize: 12, width: Math.min(190, look.width * 0.36), overflow: "truncate"},
            axisLine: {onZero: false, lineStyle: {color: look.line}},
          },
          series: data.series.map((one, index) => ({
            type: "bar", name: one.name, data: one.values, barGap: "-100%", barMaxWidth: 16,
            itemStyle: fill(look, index),
          })),
        },
      };
    },

    // A line a row from the lower to the upper end, a dot at what is expected, a cross at what was
    // measured.
    intervals(data, look) {
      const measured = data.rows.some((row) => row.measured !== undefined);
      const names = measured ? ["predicted, with its 80 % band", "measured"] : [];
      const top = measured ? legendHeight(names, look) : 6;
      const above = (data.marks || []).length ? 20 : 6;
      return {
        height: top + above + data.rows.length * 34 + 34,
        option: {
          ...base(look),
          legend: measured ? legend(look, names) : undefined,
          grid: {left: 4, right: 26, top: top + above, bottom: 6, containLabel: true},
          tooltip: {
            ...base(look).tooltip, trigger: "axis", axisPointer: {type: "shadow"},
            formatter: ([{dataIndex}]) => {
              const row = data.rows[dataIndex];
              return hover(row.name, [
                ["expected", written(row.expected, data.unit)],
                ...(row.lower === row.upper ? []
                  : [["80 % band", `${written(row.lower, data.unit)} to ${written(row.upper, data.unit)}`]]),
                ...(row.measured === undefined ? [] : [["measured", written(row.measured, data.unit)]]),
                ...(row.details || []),
              ]);
            },
          },
          xAxis: {type: "value", scale: !data.from_zero, ...axisOf(look, data.unit), axisLine: {show: false}},
          yAxis: {
            type: "category", data: data.rows.map((row) => row.name), inverse: true, axisTick: {show: false},
            axisLabel: {color: look.ink, fontSize: 12, width: Math.min(170, look.width * 0.34), overflow: "truncate"},
            axisLine: {show: false}, splitLine: {show: true, lineStyle: {color: look.faint}},
          },
          series: [
            {
              type: "custom", name: names[0] ?? "band", silent: true, encode: {x: [0, 1], y: 2}, z: 2,
              itemStyle: {color: colorOf(look, 0)}, tooltip: {show: false},
              data: data.rows.map((row, index) => [row.lower, row.upper, index]),
              renderItem(_, api) {
                const [left, y] = api.coord([api.value(0), api.value(2)]);
                const [right] = api.coord([api.value(1), api.value(2)]);
                const end = (x) => ({type: "line", shape: {x1: x, x2: x, y1: y - 6, y2: y + 6}, style});
                const style = {stroke: colorOf(look, 0), lineWidth: 2.5};
                if (right - left < 0.5) return {type: "group", children: []};
                return {type: "group", children: [
                  {type: "line", shape: {x1: left, x2: right, y1: y, y2: y}, style}, end(left), end(right)]};
              },
            },
            {
              type: "scatter", name: names[0] ?? "expected", symbolSize: 10, z: 3,
              itemStyle: {color: colorOf(look, 0)},
              data: data.rows.map((row, index) => [row.expected, index]),
              markLine: marked(look, (data.marks || []).map((one) => ({axis: "x", side: "start", ...one}))),
            },
            ...(measured ? [{
              type: "scatter", name: names[1], symbol: "diamond", symbolSize: 13, z: 4,
              itemStyle: {color: colorOf(look, 5), borderColor: look.card, borderWidth: 1},
              data: data.rows.map((row, index) => [row.measured ?? NaN, index]),
            }] : []),
          ],
        },
      };
    },

    // What is done when: a lane each, time to the right. Times are whole numbers of `tick` seconds.
    spans(data, look) {
      const ticks = data.spans.reduce((most, [, start, length]) => Math.max(most, start + length), 1);
      const row = data.lanes.length > 16 ? 16 : data.lanes.length > 8 ? 22 : 30;
      const top = legendHeight(data.kinds, look);
      const byKind = data.kinds.map(() => []);
      for (const span of data.spans) byKind[span[3]].push(span);
      const time = (count) => tick(count * data.tick, data.unit);
      const {interval} = round(ticks * data.tick, data.unit, look.width < 480 ? 3 : 6);
      const longest = Math.max(...data.lanes.map((one) => one.length)) * 6.8 + 4;
      const label = Math.min(longest, look.width < 480 ? 92 : 140), left = label + 10;
      return {
        // Thousands of elements are slow to lay out; pixels are not.
        renderer: data.spans.length > 1500 ? "canvas" : "svg",
        height: top + 8 + data.lanes.length * row + (look.printed ? 30 : 64),
        option: {
          ...base(look),
          legend: legend(look, data.kinds),
          grid: {left, right: 26, top: top + 8, bottom: look.printed ? 22 : 56},
          tooltip: {
            ...base(look).tooltip, trigger: "item",
            formatter: ({value: [, start, length, , name, batch, stage]}) => hover(data.names[name], [
              ["begins", written(start * data.tick, data.unit)], ["takes", written(length * data.tick, data.unit)],
              ...(batch === undefined ? [] : [["micro-batch", String(batch + 1)]]),
              ...(stage === undefined ? [] : [["stage of the model", String(stage + 1)]]),
            ]),
          },
          dataZoom: look.printed ? undefined : [
            {type: "slider", height: 16, bottom: 6, filterMode: "none", borderColor: look.line, left, right: 26,
              fillerColor: look.faint, showDetail: false, brushSelect: false, showDataShadow: false,
              handleStyle: {color: look.card, borderColor: look.quiet}, moveHandleSize: 0,
              backgroundColor: "transparent"},
          ],
          xAxis: {type: "value", min: 0, max: ticks, interval: interval / data.tick, ...axisOf(look, data.unit),
            splitLine: {show: false},
            axisLabel: {...axisOf(look, data.unit).axisLabel, formatter: time, showMaxLabel: false}},
          yAxis: {
            type: "category", data: data.lanes, inverse: true, axisTick: {show: false},
            axisLine: {lineStyle: {color: look.line}}, splitLine: {show: true, lineStyle: {color: look.faint}},
            axisLabel: {color: look.ink, fontSize: 12, width: label, overflow: "truncate", interval: 0},
          },
          series: data.kinds.map((kind, index) => ({
            type: "custom", name: kind, encode: {x: [1, 2], y: 0}, itemStyle: fill(look, data.colors[index]), clip: true,
            progressive: 0,
            data: byKind[index].map((span) => ({value: span})),
            renderItem(params, api) {
              const start = api.coord([api.value(1), api.value(0)]);
              const stop = api.coord([api.value(1) + api.value(2), api.value(0)]);
              const height = Math.min(20, api.size([0, 1])[1] * 0.72);
              const bound = params.coordSys;
              const left = Math.max(start[0], bound.x), right = Math.min(stop[0], bound.x + bound.width);
              if (right < left) return null;
              const wide = right - left > 6;
              return {type: "rect", style: wide ? api.style() : {...api.style(), decal: null},
                shape: {x: left, y: start[1] - height / 2, width: Math.max(right - left - (wide ? 0.6 : 0), 0.6), height, r: wide ? 1.5 : 0}};
            },
          })),
        },
      };
    },

    // What is held when: columns of values at the same times, each until the next; stacked.
    held(data, look) {
      const made = kinds.lines({
        x: data.x, y: data.y,
        series: data.series.map((one) => ({
          name: one.name, color: one.color, area: true, step: true,
          points: data.at.map((at, index) => [at * data.tick, one.values[index] * data.scale]),
        })),
      }, look);
      if (made.option.legend) made.option.legend.icon = "roundRect"; // of one series there is none
      Object.assign(made.option.yAxis, round(data.y.max, data.y.unit, 4));
      return made;
    },
  };

  return {kinds, written, escaped, hover, LIGHT, DARK};
})();
