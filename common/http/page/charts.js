// Chart.js as this page uses it: lines in their bands, and bars. Colours are the style sheet's, and each has a dash, a
// point or a pattern beside it.
const {Chart} = window;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const darkness = window.matchMedia('(prefers-color-scheme: dark)');

// How the lines of a chart look, by their place: told apart without colour too.
export const STYLES = [
  {colour: 'line-0', dash: [], point: 'circle'},
  {colour: 'line-1', dash: [7, 4], point: 'rectRot'},
  {colour: 'line-2', dash: [2, 3], point: 'triangle'},
  {colour: 'line-3', dash: [10, 3, 2, 3], point: 'rect'},
  {colour: 'line-4', dash: [4, 2], point: 'star'},
  {colour: 'line-5', dash: [1, 2], point: 'crossRot'},
];

// Bars of phases: a colour and a pattern each.
export const PHASES = [
  {name: 'forward', colour: 'phase-forward', pattern: 'plain'},
  {name: 'backward', colour: 'phase-backward', pattern: 'rising'},
  {name: 'push', colour: 'phase-push', pattern: 'dots'},
  {name: 'wait', colour: 'phase-wait', pattern: 'level'},
  {name: 'pull', colour: 'phase-pull', pattern: 'falling'},
  {name: 'other', colour: 'phase-other', pattern: 'upright'},
];

// What a pattern draws over its colour, in a square of 8.
const STROKES = {
  plain: [],
  rising: [[0, 8, 8, 0], [-1, 1, 1, -1], [7, 9, 9, 7]],
  falling: [[0, 0, 8, 8], [-1, 7, 1, 9], [7, -1, 9, 1]],
  level: [[0, 2, 8, 2], [0, 6, 8, 6]],
  upright: [[2, 0, 2, 8], [6, 0, 6, 8]],
  dots: [[2, 2, 2.1, 2], [6, 6, 6.1, 6]],
};

export function drawPattern(pattern, colourName) {
  const tile = document.createElement('canvas');
  tile.width = tile.height = 8;
  const pen = tile.getContext('2d');
  pen.fillStyle = colour(colourName);
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = colour('panel');
  pen.globalAlpha = 0.75;
  pen.lineWidth = pattern === 'dots' ? 2.5 : 1.4;
  pen.lineCap = pattern === 'dots' ? 'round' : 'butt';
  for (const [x0, y0, x1, y1] of STROKES[pattern]) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }
  return tile;
}

function fillOf(chart, {pattern, colour: name}) {
  return pattern === 'plain' ? colour(name) : chart.ctx.createPattern(drawPattern(pattern, name), 'repeat');
}

// By looking at all: after a rollback steps are not ascending.
function nearest(data, x) {
  let found = 0;
  data.forEach((each, i) => {
    if (Math.abs(each.x - x) <= Math.abs(data[found].x - x)) found = i;
  });
  return found;
}

// Finds the nearest point of each line in x: lines have points at places of their own.
Chart.Interaction.modes.eachNearest = (chart, event) => {
  const area = chart.chartArea;
  if (event.x < area.left || event.x > area.right) return [];
  const x = chart.scales.x.getValueForPixel(event.x);
  return chart.getSortedVisibleDatasetMetas().flatMap((meta) => {
    const {data, band} = chart.data.datasets[meta.index];
    if (band || data.length === 0) return [];
    const index = nearest(data, x);
    return [{datasetIndex: meta.index, index, element: meta.data[index]}];
  });
};

// Upright lines with a word: where something happened, such as a loss that is not a number.
const marks = {
  id: 'marks',
  afterDatasetsDraw(chart) {
    const {ctx, chartArea, scales} = chart;
    let free = -Infinity;  // Words begin here at the earliest.
    for (const {x, text} of chart.marks || []) {
      const at = scales.x.getPixelForValue(x);
      if (at < chartArea.left - 1 || at > chartArea.right + 1) continue;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour('bad');
      ctx.lineWidth = 1.5;
      ctx.setLineDash([3, 3]);
      ctx.beginPath();
      ctx.moveTo(at, chartArea.top);
      ctx.lineTo(at, chartArea.bottom);
      ctx.stroke();
      ctx.font = `600 11px ${Chart.defaults.font.family}`;
      const width = ctx.measureText(text).width;
      const begin = at + 4 + width > chartArea.right ? at - 4 - width : at + 4;
      if (begin > free) {
        ctx.fillText(text, begin, chartArea.top + 10);
        free = begin + width + 6;
      }
      ctx.restore();
    }
  },
};

Chart.defaults.animation = false;
Chart.defaults.responsive = true;
Chart.defaults.maintainAspectRatio = false;
Chart.defaults.font.family = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
Chart.defaults.font.size = 11;
Chart.defaults.plugins.legend.display = false;
Chart.defaults.elements.line.borderJoinStyle = 'round';

// Colours of what all charts have; again when dark becomes light.
function paint(chart) {
  for (const scale of Object.values(chart.options.scales)) {
    scale.grid.color = colour('grid');
    scale.grid.borderColor = colour('grid');
    scale.ticks.color = colour('quiet');
    if (scale.title) scale.title.color = colour('quiet');
  }
  const tooltip = chart.options.plugins.tooltip;
  tooltip.backgroundColor = colour('panel');
  tooltip.titleColor = tooltip.bodyColor = tooltip.footerColor = colour('ink');
  tooltip.borderColor = colour('edge');
}

const TOOLTIP = {borderWidth: 1, padding: 8, usePointStyle: true, boxWidth: 8, boxPadding: 4, caretSize: 0};

// Between the ticks of an axis of time, in seconds, so that there is room for each one's words.
function timeStep(seconds, width) {
  const most = Math.max(2, Math.floor(width / 60));
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
  return steps.find((step) => seconds / step <= most) || Math.ceil(seconds / most / 86400) * 86400;
}

// If all lines are at one height, the axis begins a little below and ends a little above.
function roomAround(all) {
  const values = all.flatMap(({points}) => points.flatMap(({least, mean, largest}) => [least, mean, largest])).filter(Number.isFinite);
  if (values.length === 0 || values.some((each) => each !== values[0])) return [];
  const room = Math.abs(values[0]) / 10 || 1;
  return [values[0] - room, values[0] + room];
}

// Chart.js ends an axis with a tick, however near the one before it is.
function withoutOddEnd({ticks}) {
  const gap = (i) => ticks[i].value - ticks[i - 1].value;
  if (ticks.length > 2 && gap(ticks.length - 1) < 0.999 * gap(1)) ticks.pop();
}

// A logarithmic axis has a word at 1, 2 and 5 of each decade only.
function logTick(value, format) {
  const digit = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
  return [1, 2, 5].some((each) => Math.abs(digit - each) < 1e-6) ? format(value) : '';
}

export class LineChart {
  // `y`: in words for an axis and in full; `zero`: the axis begins at 0.
  constructor(canvas, {axisText, fullText, zero = false}) {
    this.fullText = fullText;
    this.axisText = axisText;
    this.zero = zero;
    this.xText = String;
    this.chart = new Chart(canvas, {
      type: 'line',
      data: {datasets: []},
      plugins: [marks],
      options: {
        parsing: false,
        normalized: true,
        interaction: {mode: 'eachNearest', intersect: false},
        scales: {
          x: {type: 'linear', bounds: 'data', beginAtZero: true, afterBuildTicks: withoutOddEnd, grid: {drawTicks: false}, ticks: {maxRotation: 0, autoSkipPadding: 24, includeBounds: false, padding: 6, callback: (value) => this.xText(value)}},
          y: this.yScale(false),
        },
        plugins: {
          tooltip: {
            ...TOOLTIP,
            callbacks: {
              title: (items) => (items.length ? this.pointTitle(items[0].raw.point) : ''),
              label: (item) => ` ${this.labelOf(item)}`,
            },
          },
        },
      },
    });
    paint(this.chart);
  }

  yScale(log) {
    return {
      type: log ? 'logarithmic' : 'linear',
      beginAtZero: this.zero && !log,
      grid: {drawTicks: false, drawBorder: false},
      ticks: {padding: 6, maxTicksLimit: 6, callback: (value) => (log ? logTick(value, this.axisText) : this.axisText(value))},
    };
  }

  labelOf(item) {
    const {name} = item.dataset;
    const {least, mean, largest} = item.raw.point;
    const range = largest > least ? ` (${this.fullText(least)} to ${this.fullText(largest)})` : '';
    return `${name} ${this.fullText(mean)}${range}`;
  }

  // `all`: of each line its name, style, points and whether it has a band. `axis`: "time", "steps" or "samples", whose
  // key in a point is `key`.
  show(all, {key, xText, pointTitle, log, marks: where}) {
    this.xText = xText;
    this.pointTitle = pointTitle;
    const {chart} = this;
    chart.marks = where;
    if ((chart.options.scales.y.type === 'logarithmic') !== log) {
      chart.options.scales.y = this.yScale(log);
      paint(chart);
    }
    chart.data.datasets = all.flatMap((line) => this.datasetsOf(line, key, log));
    // Chart.js looks at the ends of a line only, and after a rollback the last step is not the largest.
    const last = all.reduce((most, {points}) => points.reduce((x, each) => Math.max(x, each[key]), most), 0);
    const {x, y} = chart.options.scales;
    [y.suggestedMin, y.suggestedMax] = roomAround(all);
    x.suggestedMax = last > 0 ? last : undefined;
    x.ticks.stepSize = key === 't' && last > 0 ? timeStep(last, chart.canvas.parentNode.clientWidth) : undefined;
    chart.update('none');
  }

  datasetsOf({name, style, points, band}, key, log) {
    const data = (of) => points.map((point) => {
      const y = point[of];
      return {x: point[key], y: Number.isFinite(y) && !(log && y <= 0) ? y : NaN, point};
    });
    const ink = colour(style.colour);
    const few = points.length * 14 <= this.chart.width;
    const line = {
      name,
      data: data('mean'),
      borderColor: ink,
      backgroundColor: ink,
      borderWidth: style.earlier ? 1.25 : 1.75,
      borderDash: style.dash,
      pointStyle: style.point,
      pointRadius: few && !style.earlier ? 2.5 : points.length === 1 ? 2.5 : 0,
      pointHoverRadius: 4,
      pointHitRadius: 0,
    };
    if (!band) return [line];
    const edge = {band: true, borderWidth: 0, pointRadius: 0, pointHoverRadius: 0, pointHitRadius: 0};
    return [
      {...edge, name: `${name}, least`, data: data('least')},
      {...edge, name: `${name}, largest`, data: data('largest'), fill: '-1', backgroundColor: withAlpha(ink, 0.18)},
      line,
    ];
  }

  repaint() {
    paint(this.chart);
  }
}

// The style sheet's colours are #rrggbb.
function withAlpha(hex, alpha) {
  return `${hex}${Math.round(alpha * 255).toString(16).padStart(2, '0')}`;
}

export class BarChart {
  // `across`: bars lie, and a label stands beside each.
  constructor(canvas, {across, stacked, valueText, axisText = valueText, title}) {
    this.valueText = valueText;
    const values = {
      beginAtZero: true,
      stacked,
      grid: {drawTicks: false, drawBorder: false},
      title: {display: Boolean(title), text: title, font: {size: 11}},
      ticks: {padding: 6, maxTicksLimit: 6, maxRotation: 0, callback: (value) => axisText(value)},
    };
    const labels = {stacked, grid: {display: false}, ticks: {padding: 4, autoSkip: !across, maxRotation: 0}};
    this.chart = new Chart(canvas, {
      type: 'bar',
      data: {labels: [], datasets: []},
      options: {
        indexAxis: across ? 'y' : 'x',
        interaction: {mode: 'index', axis: across ? 'y' : 'x', intersect: false},
        scales: across ? {x: values, y: labels} : {x: labels, y: values},
        plugins: {
          tooltip: {
            ...TOOLTIP,
            callbacks: {
              label: (item) => ` ${item.dataset.label ? `${item.dataset.label} ` : ''}${this.valueText(item.raw)}`,
              footer: (items) => this.footer?.(items) ?? '',
            },
          },
        },
      },
    });
    paint(this.chart);
  }

  // `groups`: of each its name, style and values, one a label.
  show(labels, groups) {
    const {chart} = this;
    chart.data.labels = labels;
    chart.data.datasets = groups.map(({name, style, values, styles}) => ({
      label: name,
      data: values,
      backgroundColor: styles ? styles.map((each) => fillOf(chart, each)) : fillOf(chart, style),
      borderColor: colour('panel'),
      borderWidth: groups.length > 1 ? {right: 1} : 0,
      barPercentage: 0.86,
      categoryPercentage: 0.9,
      maxBarThickness: 26,
    }));
    chart.update('none');
  }

  repaint() {
    paint(this.chart);
  }
}
