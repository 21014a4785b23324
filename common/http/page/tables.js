// The tables of the page: workers, servers, slowest steps; and the list of events.
import {PHASES} from './charts.js';
import {LiveTable, element, meter, setHidden, setText} from './dom.js';
import {ended, holdsUp} from './top.js';
import {bytes, clockTime, duration, figure, known, quantile, whole} from './words.js';

const $ = (id) => document.getElementById(id);
const SHOWN = 50;  // Rows, until more are asked for.
const EVENTS_KEPT = 500;

// A word with a sign: what is said is never said by a colour alone.
function tag(kind, sign, word) {
  return element('span', {class: `tag ${kind}`}, element('span', {'aria-hidden': 'true'}, `${sign} `), word);
}

// What is to be said of a worker, the worst first; none: all is well.
function remarks(worker, job) {
  const all = [];
  if ((job.progress?.waits_for || []).includes(worker.rank)) all.push(['bad', '▲', 'waited for']);
  if (worker.state === 'suspect') all.push(['bad', '?', 'suspect']);
  if (worker.slow) all.push(['warn', '▼', 'slow']);
  if (holdsUp(job, worker)) all.push(['warn', '◆', 'holds up']);
  if (worker.busy_with) all.push(['quiet', '…', worker.busy_with]);
  if (worker.state === 'done') all.push(['quiet', '✓', 'done']);
  return all;
}

// The worst first, in steps of a hundredth of the job's time, so that equals do not change places each second.
export function worstFirst(job) {
  const grain = Math.max(0.5, (job.progress?.running_s || 0) / 100);
  const badness = (worker) => {
    const said = remarks(worker, job).map(([kind]) => kind);
    return (said.includes('bad') ? 2e6 : said.includes('warn') ? 1e6 : 0) + Math.min(1e5, Math.floor((worker.held_up_s || 0) / grain));
  };
  return (job.workers || [])
    .map((worker) => ({worker, bad: badness(worker)}))
    .sort((a, b) => b.bad - a.bad || a.worker.rank - b.worker.rank)
    .map(({worker}) => worker);
}

export const marked = (worker, job) => remarks(worker, job).some(([kind]) => kind === 'bad' || kind === 'warn');

function phaseBar(times) {
  const all = PHASES.reduce((sum, {name}) => sum + (times?.[name] || 0), 0);
  if (all <= 0) return '–';
  const bar = element('span', {class: 'phases', 'aria-hidden': 'true'});
  for (const {name, colour} of PHASES) {
    const part = element('span', {class: `fill-${colour}`});
    part.style.width = `${((times[name] || 0) / all) * 100}%`;
    bar.append(part);
  }
  return bar;
}

function longestPhases(times) {
  const all = PHASES.reduce((sum, {name}) => sum + (times?.[name] || 0), 0);
  if (all <= 0) return '';
  return PHASES.map(({name}) => ({name, share: (times[name] || 0) / all}))
    .sort((a, b) => b.share - a.share).slice(0, 2).filter(({share}) => share >= 0.05)
    .map(({name, share}) => `${name} ${Math.round(share * 100)} %`).join(', ');
}

// A table below its heading, of which the first rows are shown until more are asked for.
class Section {
  constructor(id, columns, options) {
    this.table = new LiveTable(columns, options);
    this.all = false;
    this.more = element('button', {type: 'button', class: 'more', hidden: true, onclick: () => {
      this.all = !this.all;
      this.draw();
    }});
    this.nothing = element('p', {class: 'nothing'}, 'Nothing yet.');
    $(id).append(this.nothing, this.table.room, this.more);
    this.rows = [];
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const more = this.rows.length > SHOWN;
    setHidden(this.nothing, this.rows.length > 0);
    setHidden(this.table.room, this.rows.length === 0);
    setHidden(this.more, !more);
    setText(this.more, this.all ? `Show the first ${SHOWN} only` : `Show all ${whole(this.rows.length)}`);
    this.table.show(this.all ? this.rows : this.rows.slice(0, SHOWN));
  }
}

export class Tables {
  constructor() {
    this.job = {};
    this.workers = new Section('workers', [
      {title: 'Rank', heading: true, number: true, text: (worker) => String(worker.rank)},
      {title: 'State', key: (worker) => JSON.stringify([worker.state, remarks(worker, this.job)]), cell: (worker) => {
        const said = remarks(worker, this.job);
        return said.length ? said.map((each) => tag(...each)) : worker.state === 'live' ? tag('good', '●', 'live') : tag('quiet', '·', worker.state);
      }},
      {title: 'Held up others', number: true, hint: 'For how long others waited for this rank', key: (worker) => `${duration(worker.held_up_s)} ${Math.round(200 * this.heldUpShare(worker))}`,
        cell: (worker) => [duration(worker.held_up_s), meter(this.heldUpShare(worker), marked(worker, this.job) ? 'warn' : '')]},
      {title: 'Last heard', number: true, text: (worker) => (worker.state !== 'live' && worker.state !== 'suspect' ? '–' : `${duration(worker.last_heard_s)} ago`)},
      {title: 'Step', number: true, text: (worker) => whole(worker.step)},
      {title: 'Steps/s', number: true, text: (worker) => figure(worker.steps_per_s)},
      {title: 'Loss', number: true, text: (worker) => (worker.loss ? figure(worker.loss.mean) : '–')},
      {title: 'Where its time went', key: (worker) => longestPhases(worker.seconds), cell: (worker) => [phaseBar(worker.seconds), element('span', {class: 'small'}, longestPhases(worker.seconds))]},
      {title: 'Name and host', text: (worker) => [worker.name, worker.host].filter(Boolean).join(' on ')},
      {title: 'Link', text: (worker) => (worker.link || '–').replaceAll('_', ' ').replaceAll(',', ', ')},
      {title: 'Device', text: (worker) => worker.device || '–'},
      {title: 'Sent', number: true, text: (worker) => bytes(worker.sent_bytes)},
      {title: 'Received', number: true, text: (worker) => bytes(worker.received_bytes)},
      {title: 'Samples', number: true, text: (worker) => whole(worker.samples)},
      {title: 'Reports dropped', number: true, text: (worker) => whole(worker.dropped_reports)},
    ], {caption: 'Workers, the worst first', rowKey: (worker) => worker.rank, rowClass: (worker) => (marked(worker, this.job) ? 'straggler' : '')});

    const spread = (name) => ({number: true, text: (shard) => this.spread(shard[name])});
    this.servers = new Section('servers', [
      {title: 'Server', heading: true, number: true, text: (shard) => String(shard.shard)},
      {title: 'Version', number: true, text: (shard) => whole(shard.version)},
      {title: 'Bytes in flight', number: true, ...this.limit('inflight_bytes', 'inflight_limit_bytes', bytes)},
      {title: 'Parked calls', number: true, ...this.limit('parked_calls', 'parked_calls_limit', whole)},
      {title: 'Version buffers', number: true, ...this.limit('version_buffers', 'version_buffers_limit', whole)},
      {title: 'Push', hint: 'From a push’s first slices to its last', ...spread('push_seconds')},
      {title: 'Apply', hint: 'From the decision on a version until it is there', ...spread('apply_seconds')},
      {title: 'Wait of a push', hint: 'For how long calls were parked for a push’s answer', ...spread('push_wait_seconds')},
      {title: 'Wait of a pull', hint: 'For how long calls were parked for weights', ...spread('pull_wait_seconds')},
      {title: 'Checkpoint', text: (shard) => (known(shard.checkpoint_age_s) ? `${duration(shard.checkpoint_age_s)} ago` : 'none') + (shard.checkpoint_failures ? `, ${whole(shard.checkpoint_failures)} failed` : '')},
      {title: 'Pushes', text: (shard) => counts(shard.answers)},
      {title: 'Samples dropped', number: true, text: (shard) => whole(shard.dropped_samples)},
      {title: 'Refused calls', text: (shard) => counts(shard.refused_calls) || 'none'},
      {title: 'Received, sent', text: (shard) => (shard.links || []).map((each) => `${each.link.replaceAll('_', ' ')} ${bytes(each.received_bytes)}, ${bytes(each.sent_bytes)}`).join('; ') || '–'},
      {title: 'Weights', number: true, text: (shard) => bytes(shard.weight_bytes)},
      {title: 'Address', text: (shard) => shard.address || '–'},
    ], {caption: 'Servers, their limits and checkpoints', rowKey: (shard) => shard.shard});

    this.slowest = new Section('slowest', [
      {title: 'Rank', heading: true, number: true, text: (step) => String(step.rank)},
      {title: 'Step', number: true, text: (step) => whole(step.step)},
      {title: 'Took', number: true, text: (step) => duration(step.seconds)},
      {title: 'Usual steps', number: true, hint: 'So many times what a step of a worker takes', text: (step) => (this.job.progress?.worker_step_s > 0 ? `${figure(step.seconds / this.job.progress.worker_step_s)} ×` : '–')},
      {title: 'Where its time went', key: (step) => JSON.stringify(step.times), cell: (step) => [phaseBar(step.times), element('span', {class: 'small'}, longestPhases(step.times))]},
      {title: 'When', number: true, text: (step) => (step.unix_ms ? clockTime(step.unix_ms) : '–')},
    ], {caption: 'The slowest steps', rowKey: (step) => `${step.rank} ${step.step} ${step.unix_ms}`});

    this.events = [];
    this.list = new Section('events', [
      {title: 'Time', number: true, text: (event) => clockTime(event.unix_ms)},
      {title: 'What happened', key: (event) => `${event.kind} ${event.text}`, cell: (event) => [eventTag(event.kind), ' ', event.text]},
    ], {caption: 'Events, the newest first', rowKey: (event) => event.number});
  }

  heldUpShare(worker) {
    const most = Math.max(...(this.job.workers || []).map((each) => each.held_up_s || 0));
    return most > 0 ? (worker.held_up_s || 0) / most : 0;
  }

  limit(value, most, text) {
    const share = (shard) => (shard[most] > 0 ? shard[value] / shard[most] : 0);
    return {
      key: (shard) => `${shard[value]} ${shard[most]}`,
      cell: (shard) => [`${text(shard[value])} of ${text(shard[most])}`, share(shard) >= 0.9 ? tag('warn', '▲', 'nearly full') : '', meter(share(shard), share(shard) >= 0.9 ? 'warn' : '')],
    };
  }

  spread(distribution) {
    const bounds = this.job.seconds_bounds || [];
    const middle = quantile(distribution?.counts, bounds, 0.5);
    // No more is known of what is in the first range.
    const text = (seconds) => (seconds <= bounds[0] ? `< ${duration(bounds[0])}` : duration(seconds));
    return middle === null ? '–' : `${text(middle)}, ${text(quantile(distribution.counts, bounds, 0.95))}`;
  }

  show(job) {
    this.job = job;
    const workers = worstFirst(job);
    this.workers.show(workers);
    setText($('workers-now'), summary(workers, job));
    this.servers.show(job.shards || []);
    setText($('servers-now'), checkpointSummary(job));
    this.slowest.show(job.slowest || []);
    setText($('slowest-now'), job.progress?.worker_step_s > 0 ? `a worker's step takes ${duration(job.progress.worker_step_s)}` : '');
  }

  // `restarted`: the server counts from the beginning again.
  take(events, restarted) {
    if (restarted) this.events = [];
    if (events.length === 0 && !restarted) return;
    const known = new Set(this.events.map((event) => event.number));
    const news = events.filter((event) => !known.has(event.number));
    this.events = [...news.reverse(), ...this.events].slice(0, EVENTS_KEPT);
    this.list.show(this.events);
  }
}

function counts(answers) {
  return Object.entries(answers || {}).filter(([, n]) => n > 0).map(([name, n]) => `${whole(n)} ${name}`).join(', ');
}

function summary(workers, job) {
  const of = (state) => workers.filter((worker) => worker.state === state).length;
  const missing = Math.max(0, (job.num_workers || 0) - workers.length);
  return [[of('live'), 'live'], [of('suspect'), 'suspect'], [of('done'), 'done'], [of('left'), 'left'], [ended(job) ? 0 : missing, 'missing'], [job.standbys || 0, 'standing by']]
    .filter(([n]) => n > 0).map(([n, word]) => `${whole(n)} ${word}`).join(', ');
}



function checkpointSummary({checkpoints, chief}) {
  if (chief) return '';
  if (!checkpoints) return 'no checkpoints are written';
  if (checkpoints.failure) return `the last checkpoint failed: ${checkpoints.failure}`;
  return checkpoints.path ? `last checkpoint ${duration(checkpoints.age_s)} ago: ${checkpoints.path}` : 'no checkpoint yet';
}

const EVENT_KINDS = {
  lost: ['bad', '✕'], suspect: ['bad', '?'], stuck: ['bad', '▲'], 'checkpoint failed': ['bad', '✕'], slow: ['warn', '▼'], 'slow step': ['warn', '▼'],
  rollback: ['warn', '↺'], joined: ['good', '→'], done: ['good', '✓'], 'goes on': ['good', '●'], left: ['quiet', '←'],
};

function eventTag(kind) {
  const [colour, sign] = EVENT_KINDS[kind] || ['quiet', '·'];
  return tag(colour, sign, kind.replaceAll('_', ' '));
}

