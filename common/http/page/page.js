// Polls, and hands what came to the parts of the page.
import {STYLES, darkness} from './charts.js';
import {element, setHidden, setText} from './dom.js';
import {BarsPanel, LinePanel, PhasesPanel} from './panels.js';
import {Poll, get} from './poll.js';
import {Series} from './series.js';
import {Tables, marked, worstFirst} from './tables.js';
import {announce, ended, showGone, showTop} from './top.js';
import {clockTime, duration, figure, percent, short, shortDuration, whole} from './words.js';

const $ = (id) => document.getElementById(id);
const BARS_MOST = 32;    // Ranks in a chart; the worst of more.
const RECENT_S = 60;     // What "the last minute" is.
const RUN_EVERY_MS = 5000;
const MORE_MS = 200;  // Until the next piece of a run is asked for.
const ANNOUNCED = ['lost', 'rollback', 'checkpoint failed'];  // Kinds of events that screen readers hear.
const SPLITS = ['train', 'test', 'validation'];

class Page {
  constructor() {
    this.job = null;
    this.series = {};
    this.runs = new Map();    // By name, of earlier runs that were chosen: series, cursor, when they were asked for.
    this.axis = 'time';
    this.recent = false;
    this.snapshots = [];      // Of the last minute: when, and of each rank its steps and seconds.
    this.answeredMs = 0;
    this.tables = new Tables();
    this.panels = {
      loss: new LinePanel({id: 'loss', title: 'Loss', kind: 'wide', log: true}),
      accuracy: new LinePanel({id: 'accuracy', title: 'Accuracy', fullText: percent, axisText: (value) => (value > 1.0001 || value < 0 ? '' : percent(value))}),
      speed: new LinePanel({id: 'speed', title: 'Samples/s', zero: true}),
      steps: new LinePanel({id: 'steps', title: 'Steps/s', zero: true}),
      rate: new LinePanel({id: 'rate', title: 'Learning rate', zero: true}),
      phases: new PhasesPanel({id: 'phases', title: 'Where time goes, by rank'}),
      heldUp: new BarsPanel({
        id: 'held-up', title: 'Held up by', labelTitle: 'Rank', valueTitle: 'Held up others', shareTitle: 'Of the time',
        valueText: duration, axisText: shortDuration, axisTitle: 'Time that others waited for it', across: true}),
      staleness: new BarsPanel({
        id: 'staleness', title: 'Staleness', labelTitle: 'Versions', valueTitle: 'Pushes', shareTitle: 'Of all',
        valueText: whole, axisText: short, axisTitle: ''}),
    };
    const {loss, accuracy, speed, steps, rate, phases, heldUp, staleness} = this.panels;
    $('curves').append(loss.node, accuracy.node, speed.node, steps.node, rate.node);
    $('holds').append(phases.node, heldUp.node, staleness.node);
    phases.tools.prepend(this.recentButton());
    for (const choice of document.querySelectorAll('input[name=axis]')) {
      choice.addEventListener('change', () => {
        this.axis = choice.value;
        this.drawCurves();
      });
    }
    darkness.addEventListener('change', () => Object.values(this.panels).forEach((panel) => panel.repaint()));
    this.poll = new Poll({take: (news) => this.take(news), lost: (...why) => this.lose(...why)});
    this.poll.wake();
  }

  recentButton() {
    const button = element('button', {
      type: 'button', 'aria-pressed': 'false', title: 'Only what happened in the last minute', onclick: () => {
        this.recent = !this.recent;
        button.setAttribute('aria-pressed', String(this.recent));
        this.drawHolds();
      },
    }, 'last minute');
    return button;
  }

  take({job, series, events, restarted}) {
    if (restarted) {
      this.snapshots = [];
      this.series = {};
    }
    // Workers leave as their job ends: what they did stays.
    if (ended(job) && !job.workers?.length && this.job?.workers?.length) {
      job.workers = this.job.workers.map((worker) => ({...worker, state: worker.state === 'done' ? 'done' : 'left', slow: false}));
    }
    this.job = job;
    this.answeredMs = Date.now();
    let changed = false;
    for (const [name, news] of Object.entries(series)) {
      this.series[name] ??= new Series();
      changed = this.series[name].take(news) || changed;
    }
    this.remember(job);
    document.body.classList.toggle('shard-only', Boolean(job.chief));
    showTop(job);
    setText($('freshness'), ended(job) ? `as of ${clockTime(this.answeredMs)}` : `live, ${clockTime(this.answeredMs)}`);
    setText($('version'), `psgrad ${job.version || ''}, generation ${job.generation ?? '–'}`);
    this.showRuns(job.runs || []);
    for (const [name, run] of this.runs) if (this.answeredMs - run.askedMs >= RUN_EVERY_MS) this.askForRun(name);
    const begin = performance.now();
    if (changed || !this.drawn) this.drawCurves();
    this.drawHolds();
    // For whoever measures the page: what drawing took.
    document.body.dataset.redrawMs = (performance.now() - begin).toFixed(1);
    this.drawn = true;
    this.tables.show(job);
    this.tables.take(events, restarted);
    if (this.heard) events.filter(({kind}) => ANNOUNCED.includes(kind)).forEach(({text}) => announce(text));
    this.heard = true;
  }

  lose(reason, nowMs, retryMs) {
    showGone(reason, this.answeredMs || nowMs, this.job, retryMs);
  }

  remember(job) {
    const ranks = new Map((job.workers || []).map(({rank, steps, seconds, held_up_s: heldUp}) => [rank, {steps, seconds, heldUp}]));
    this.snapshots.push({ms: job.unix_ms || this.answeredMs, ranks});
    const oldest = (job.unix_ms || this.answeredMs) - RECENT_S * 1000;
    while (this.snapshots.length > 2 && this.snapshots[1].ms <= oldest) this.snapshots.shift();
  }

  // The lines of a kind: the job's own, and after them those of earlier runs.
  lines(wanted) {
    const all = [];
    wanted.forEach(({key, name}, place) => {
      if (this.series[key]) all.push({name, style: STYLES[place % STYLES.length], points: this.series[key].points});
    });
    let place = 3;
    for (const [run, {series}] of this.runs) {
      for (const {key, name} of wanted) {
        if (!series?.[key]) continue;
        all.push({name: `${run}: ${name}`, style: {...STYLES[3 + (place % 3)], earlier: true}, points: series[key].points});
        place += 1;
      }
    }
    return all;
  }

  // The series of each split: "loss.test".
  splits(of) {
    const names = new Set([this.series, ...[...this.runs.values()].map((run) => run.series || {})].flatMap((series) => Object.keys(series)));
    return [...names].filter((name) => name.startsWith(`${of}.`)).map((name) => name.slice(of.length + 1))
      .sort((a, b) => SPLITS.indexOf(a) - SPLITS.indexOf(b)).map((split) => ({key: `${of}.${split}`, name: split}));
  }

  drawCurves() {
    const {loss, accuracy, speed, steps, rate} = this.panels;
    const of = (key) => this.series[key]?.last;
    const now = (key, text) => (of(key) ? `${text(of(key).mean)} now` : '');
    const trained = this.splits('loss').some(({name}) => name === 'train') ? 'training, batches' : 'training';
    loss.say(now('loss', figure), notFinite(this.series.loss));
    loss.show(this.lines([{key: 'loss', name: trained}, ...this.splits('loss').map(({key, name}) => ({key, name: name === 'train' ? 'training, evaluated' : name}))]), this.axis);
    const splits = this.splits('accuracy');
    accuracy.say(splits.map(({key, name}) => (of(key) ? `${percent(of(key).mean)} ${name}` : '')).filter(Boolean).join(', '));
    accuracy.show(this.lines(splits.length ? [{key: 'none', name: ''}, ...splits] : []), this.axis);
    speed.say(now('samples_per_s', figure));
    speed.show(this.lines([{key: 'samples_per_s', name: 'samples/s'}]), this.axis);
    steps.say(now('steps_per_s', figure));
    steps.show(this.lines([{key: 'steps_per_s', name: 'steps/s'}]), this.axis);
    rate.say(now('learning_rate', figure));
    rate.show(this.lines([{key: 'learning_rate', name: 'learning rate'}]), this.axis);
  }

  drawHolds() {
    const {job} = this;
    const workers = job.workers || [];
    const worst = worstFirst(job).slice(0, BARS_MOST).sort((a, b) => a.rank - b.rank);
    const few = workers.length > BARS_MOST ? `The worst ${BARS_MOST} of ${whole(workers.length)} ranks.` : '';
    const since = this.recent && this.snapshots.length > 1 ? this.snapshots[0] : null;
    const seconds = since ? Math.max(0.001, ((job.unix_ms || this.answeredMs) - since.ms) / 1000) : job.progress?.running_s || 0;
    const span = since ? `In the last ${duration(seconds)}.` : '';
    const label = (worker) => `${marked(worker, job) ? '▲ ' : ''}rank ${worker.rank}`;

    const phases = worst.map((worker) => perStep(worker, since?.ranks.get(worker.rank))).filter(Boolean)
      .map((row) => ({...row, label: label(row.worker)}));
    this.panels.phases.show(phases, [few, span].filter(Boolean).join(' '));

    const nobodyWaits = ['asp', 'easgd'].includes(job.mode);
    const heldUp = worst.map((worker) => {
      const value = Math.max(0, (worker.held_up_s || 0) - (since?.ranks.get(worker.rank)?.heldUp || 0));
      return {key: worker.rank, label: label(worker), value, share: seconds > 0 ? percent(value / seconds) : '–', marked: marked(worker, job)};
    });
    const all = heldUp.reduce((sum, row) => sum + row.value, 0);
    const most = heldUp.reduce((a, b) => (b.value > (a?.value || 0) ? b : a), null);
    const share = most && all > 0 ? `${most.label.replace('▲ ', '')} has ${percent(most.value / all)} of it` : '';
    this.panels.heldUp.show(nobodyWaits && all === 0 ? [] : heldUp, {
      now: share, note: [few, span].filter(Boolean).join(' '), words: share || 'nobody held the others up'});
    setText(this.panels.heldUp.nothing, nobodyWaits ? `In ${job.mode} nobody waits for another; a rank under half the median steps/s is marked slow.` : 'Nothing yet.');

    const {bounds = [], counts = []} = job.staleness || {};
    const pushes = counts.reduce((sum, each) => sum + each, 0);
    const fresh = pushes > 0 ? `${percent(counts[0] / pushes)} of pushes were not stale` : '';
    const lastUsed = counts.findLastIndex((each) => each > 0);
    this.panels.staleness.show(pushes === 0 ? [] : counts.slice(0, Math.max(5, lastUsed + 2)).map((value, i) => ({
      key: i, label: rangeName(bounds, i), value, share: percent(value / pushes), marked: false,
    })), {words: fresh, note: pushes > 0 ? `${fresh}. Staleness is the number of versions between the one that a push was computed on and the one that it went into.` : ''});
  }

  showRuns(runs) {
    setHidden($('runs'), runs.length === 0);
    const names = JSON.stringify(runs);
    if (this.runNames === names) return;
    this.runNames = names;
    $('run-choices').replaceChildren(...runs.map((name) => element('label', {class: 'choice'},
      element('input', {type: 'checkbox', checked: this.runs.has(name), onchange: (event) => this.chooseRun(name, event.currentTarget.checked)}),
      element('span', {}, name))));
    for (const name of this.runs.keys()) if (!runs.includes(name)) this.runs.delete(name);
  }

  async chooseRun(name, chosen) {
    if (!chosen) {
      this.runs.delete(name);
      this.drawCurves();
      return;
    }
    this.runs.set(name, {series: {}, cursor: '', askedMs: 0});
    await this.askForRun(name);
  }

  // A run that is called earlier may still go on.
  async askForRun(name) {
    const run = this.runs.get(name);
    run.askedMs = Date.now();
    try {
      const since = run.cursor ? `&since=${encodeURIComponent(run.cursor)}` : '';
      const {series = {}, cursor = '', more = false} = await get(`api/v1/series?run=${encodeURIComponent(name)}${since}`);
      if (this.runs.get(name) !== run) return;
      run.cursor = cursor;
      for (const [key, news] of Object.entries(series)) (run.series[key] ??= new Series()).take(news);
      setText($('run-problem'), '');
      this.drawCurves();
      // A long run is told in pieces.
      if (more && !document.hidden) setTimeout(() => this.runs.get(name) === run && this.askForRun(name), MORE_MS);
    } catch (error) {
      setText($('run-problem'), `The run “${name}” cannot be shown: ${error.message}.`);
    }
  }
}

function notFinite(series) {
  const at = series?.lastNotFinite;
  return at && at.mean !== null ? `▲ The loss was ${at.mean} at step ${whole(at.steps)}.` : '';
}

// A rank's mean seconds a step by phase, since an earlier snapshot of it, or since it joined; null: no step yet.
function perStep(worker, before) {
  if (!worker.seconds) return null;
  const same = before?.seconds && before.steps <= worker.steps ? before : null;
  const steps = worker.steps - (same?.steps || 0);
  if (!(steps > 0)) return null;
  const each = {};
  let all = 0;
  for (const [name, value] of Object.entries(worker.seconds)) {
    each[name] = Math.max(0, (value || 0) - (same?.seconds[name] || 0)) / steps;
    all += each[name];
  }
  return {worker, rank: worker.rank, perStep: each, all};
}

function rangeName(bounds, i) {
  if (i >= bounds.length) return `> ${bounds[bounds.length - 1]}`;
  const from = i === 0 ? 0 : bounds[i - 1] + 1;
  return from === bounds[i] ? String(bounds[i]) : `${from}–${bounds[i]}`;
}

new Page();
