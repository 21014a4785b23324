// A panel: a chart, its legend, and the same as a table.
import {BarChart, LineChart, PHASES, drawPattern} from './charts.js';
import {LiveTable, element, setHidden, setText, svg} from './dom.js';
import {AXES, hasBand, merged} from './series.js';
import {duration, figure, short, shortDuration, stopwatch, whole} from './words.js';

const TABLE_ROWS = 100;  // Of a line; more points are merged, and keep their least and largest.

class Panel {
  constructor({id, title, hint, kind}, columns, rowKey) {
    this.title = title;
    this.canvas = element('canvas', {role: 'img', 'aria-label': title});
    this.chartRoom = element('div', {class: 'chart'}, this.canvas);
    this.nothing = element('p', {class: 'nothing'}, 'Nothing yet.');
    this.now = element('span', {class: 'now'});
    this.legend = element('div', {class: 'legend', role: 'group', 'aria-label': `Lines of “${title}”`});
    this.note = element('p', {class: 'note'});
    this.tabled = false;
    this.table = new LiveTable(columns, {caption: `${title}, as a table`, rowKey});
    this.table.room.classList.add('beside');
    this.table.room.id = `${id}-table`;
    this.table.room.hidden = true;
    this.button = element('button', {
      type: 'button', class: 'as-table', 'aria-expanded': 'false', 'aria-controls': `${id}-table`, onclick: () => this.toggle(),
    }, element('span', {class: 'unseen'}, `${title} as a `), 'table');
    this.tools = element('div', {class: 'tools'}, this.button);
    this.node = element('section', {id, class: `panel ${kind || ''}`, 'aria-labelledby': `${id}-title`},
      element('header', {}, element('h2', {id: `${id}-title`}, title), this.now, this.tools),
      hint ? element('p', {class: 'hint'}, hint) : null,
      this.legend, this.chartRoom, this.nothing, this.table.room, this.note);
    setHidden(this.chartRoom, true);
  }

  toggle() {
    this.tabled = !this.tabled;
    this.button.setAttribute('aria-expanded', String(this.tabled));
    this.draw();
  }

  // Shows the chart or the table, or that there is nothing yet.
  reveal(empty) {
    setHidden(this.nothing, !empty);
    setHidden(this.chartRoom, empty || this.tabled);
    setHidden(this.table.room, empty || !this.tabled);
  }

  describe(text) {
    const label = `${this.title}: ${text}`;
    if (this.canvas.getAttribute('aria-label') !== label) this.canvas.setAttribute('aria-label', label);
  }

  say(now, note = '') {
    setText(this.now, now);
    setText(this.note, note);
    setHidden(this.note, note === '');
  }
}

const X_TEXT = {time: stopwatch, steps: short, samples: short};

export class LinePanel extends Panel {
  constructor(options) {
    const text = options.fullText || figure;
    super(options, [
      {title: 'Line', heading: true, text: (row) => row.line},
      {title: 'Time', number: true, text: (row) => stopwatch(row.t)},
      {title: 'Step', number: true, text: (row) => whole(row.steps)},
      {title: 'Samples', number: true, text: (row) => whole(row.samples)},
      {title: 'Least', number: true, text: (row) => text(row.least)},
      {title: 'Mean', number: true, text: (row) => text(row.mean)},
      {title: 'Largest', number: true, text: (row) => text(row.largest)},
      {title: 'Points', number: true, text: (row) => whole(row.points), hint: 'So many points of the chart are in this row'},
    ], (row) => `${row.line} ${row.place}`);
    this.fullText = text;
    this.chart = new LineChart(this.canvas, {
      axisText: options.axisText || short, fullText: text, zero: options.zero});
    this.hidden = new Set();
    this.lines = [];
    this.view = {axis: 'time'};
    if (options.log) this.tools.prepend(this.logButton());
  }

  logButton() {
    const button = element('button', {
      type: 'button', 'aria-pressed': 'false', 'aria-label': `${this.title} on a log scale`, onclick: () => {
        this.log = !this.log;
        button.setAttribute('aria-pressed', String(this.log));
        this.draw();
      },
    }, element('span', {class: 'unseen'}, `${this.title} on a `), 'log', element('span', {class: 'unseen'}, 'arithmic scale'));
    return button;
  }

  // `lines`: of each its name, style and points.
  show(lines, axis) {
    this.lines = lines.filter((line) => line.points.length > 0);
    this.view.axis = axis;
    this.draw();
  }

  draw() {
    const {axis} = this.view;
    const shown = this.lines.filter((line) => !this.hidden.has(line.name));
    this.reveal(this.lines.length === 0);
    this.showLegend();
    if (this.lines.length === 0) return;
    if (this.tabled) {
      this.table.show(shown.flatMap((line) => rowsOf(line)));
      return;
    }
    const key = AXES[axis];
    this.chart.show(shown.map((line) => ({...line, band: !line.style.earlier && hasBand(line.points)})), {
      key,
      log: Boolean(this.log),
      xText: X_TEXT[axis],
      pointTitle: (point) => `${stopwatch(point.t)} · step ${whole(point.steps)} · ${whole(point.samples)} samples`,
      marks: shown.flatMap((line) => marksOf(line, key)),
    });
    this.describe(shown.map((line) => this.inWords(line)).join('; ') || 'all lines are hidden');
  }

  inWords({name, points}) {
    const [first, last] = [points[0], points[points.length - 1]];
    return `${name} from ${this.fullText(first.mean)} to ${this.fullText(last.mean)} at step ${whole(last.steps)}`;
  }

  showLegend() {
    const names = JSON.stringify(this.lines.map((line) => [line.name, line.style.colour]));
    if (this.legendOf === names) return;
    this.legendOf = names;
    this.legend.replaceChildren(...this.lines.map(({name, style}) => element('button', {
      type: 'button',
      'aria-pressed': String(!this.hidden.has(name)),
      title: 'Show or hide this line',
      onclick: (event) => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        event.currentTarget.setAttribute('aria-pressed', String(!this.hidden.has(name)));
        this.draw();
      },
    }, lineSwatch(style), name)));
    setHidden(this.legend, this.lines.length < 2);
  }

  repaint() {
    this.chart.repaint();
    this.draw();
  }
}

function lineSwatch({colour, dash}) {
  return svg('svg', {viewBox: '0 0 26 10', width: 26, height: 10, 'aria-hidden': 'true', class: `ink-${colour}`},
    svg('line', {x1: 0, y1: 5, x2: 26, y2: 5, 'stroke-width': 2.5, stroke: 'currentColor', 'stroke-dasharray': dash.join(' ')}));
}

// The newest first.
function rowsOf({name, points}) {
  return merged(points, TABLE_ROWS).map((row, place) => ({...row, line: name, place})).reverse();
}

// Where a line became, and was last, not a finite number.
function marksOf({points}, key) {
  const not = points.filter((each) => each.mean !== null && !Number.isFinite(each.mean));
  const ends = not.length > 1 ? [not[0], not[not.length - 1]] : not;
  return ends.map((each) => ({x: each[key], text: String(each.mean).replace('Infinity', '∞')}));
}

export class PhasesPanel extends Panel {
  constructor(options) {
    super(options, [
      {title: 'Rank', heading: true, text: (row) => row.label},
      ...PHASES.map(({name}) => ({title: name, number: true, text: (row) => duration(row.perStep[name])})),
      {title: 'a step', number: true, text: (row) => duration(row.all)},
    ], (row) => row.rank);
    this.chart = new BarChart(this.canvas, {across: true, stacked: true, valueText: duration, axisText: shortDuration, title: 'Mean time of a step'});
    this.chart.footer = (items) => `${duration(items.reduce((sum, item) => sum + item.raw, 0))} a step`;
    this.rows = [];
    this.legend.setAttribute('aria-label', 'Phases of a step');
    this.showLegend();
  }

  showLegend() {
    this.legend.replaceChildren(...PHASES.map(({name, colour, pattern}) => {
      const tile = drawPattern(pattern, colour);
      const swatch = element('canvas', {class: 'swatch', width: 16, height: 16, 'aria-hidden': 'true'});
      const pen = swatch.getContext('2d');
      pen.fillStyle = pen.createPattern(tile, 'repeat');
      pen.fillRect(0, 0, 16, 16);
      return element('span', {}, swatch, name);
    }));
  }

  // `rows`: of each rank its label and seconds a step by phase.
  show(rows, note) {
    this.rows = rows;
    this.say('', note);
    this.draw();
  }

  draw() {
    this.reveal(this.rows.length === 0);
    setHidden(this.legend, this.rows.length === 0);
    if (this.rows.length === 0) return;
    if (this.tabled) {
      this.table.show(this.rows);
      return;
    }
    sizeFor(this.chartRoom, this.rows.length);
    this.chart.show(this.rows.map((row) => row.label),
      PHASES.map((phase) => ({name: phase.name, style: phase, values: this.rows.map((row) => row.perStep[phase.name])})));
    const slowest = this.rows.reduce((a, b) => (b.all > a.all ? b : a));
    this.describe(`mean time of a step by rank; the longest is ${duration(slowest.all)} of ${slowest.label}`);
  }

  repaint() {
    this.chart.repaint();
    this.showLegend();
    this.draw();
  }
}

// Bars of one kind: held-up time by rank, staleness.
export class BarsPanel extends Panel {
  constructor(options) {
    super(options, [
      {title: options.labelTitle, heading: true, text: (row) => row.label},
      {title: options.valueTitle, number: true, text: (row) => options.valueText(row.value)},
      {title: options.shareTitle, number: true, text: (row) => row.share},
    ], (row) => row.key);
    this.options = options;
    this.chart = new BarChart(this.canvas, {
      across: options.across, valueText: options.valueText, axisText: options.axisText, title: options.axisTitle});
    this.rows = [];
    setHidden(this.legend, true);
  }

  // `rows`: of each a key, label, value, share (text) and whether it is marked.
  show(rows, {now = '', note = '', words = ''}) {
    this.rows = rows;
    this.words = words;
    this.say(now, note);
    this.draw();
  }

  draw() {
    this.reveal(this.rows.length === 0);
    if (this.rows.length === 0) return;
    if (this.tabled) {
      this.table.show(this.rows);
      return;
    }
    if (this.options.across) sizeFor(this.chartRoom, this.rows.length);
    const style = (row) => (row.marked ? {colour: 'warn-fill', pattern: 'rising'} : {colour: 'line-0', pattern: 'plain'});
    this.chart.show(this.rows.map((row) => row.label),
      [{name: '', values: this.rows.map((row) => row.value), styles: this.rows.map(style)}]);
    this.describe(this.words);
  }

  repaint() {
    this.chart.repaint();
    this.draw();
  }
}

// A room that is as high as its bars need.
function sizeFor(room, bars) {
  const height = `${Math.max(170, bars * 24 + 48)}px`;
  if (room.style.minHeight !== height) room.style.minHeight = height;
}
