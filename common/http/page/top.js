// The head of the page: what the job does now, in words and in the main figures; and whether the server still answers.
import {element, setClass, setHidden, setText} from './dom.js';
import {clockTime, duration, figure, known, number, percent, ranks, shortDuration, whole} from './words.js';

const $ = (id) => document.getElementById(id);

// How a job is, in a word, with a sign and a colour.
const STATES = {
  gathering: ['…', 'waits to begin', 'quiet'],
  running: ['●', 'running', 'good'],
  waiting: ['◔', 'waiting', 'warn'],
  stuck: ['▲', 'stuck', 'bad'],
  finished: ['✓', 'finished', 'good'],
  failed: ['✕', 'failed', 'bad'],
  'shut down': ['■', 'shut down', 'quiet'],
  gone: ['⚠', 'not answering', 'bad'],
  unknown: ['?', 'not known', 'quiet'],
  part: ['◦', 'a server of the job', 'quiet'],
};

// A shorter wait is a step's usual one: so many seconds, and so many median steps.
const WAITING_S = 1;
const WAITING_STEPS = 5;

export function stateOf(job) {
  // A server that is not the chief shows what it knows itself, and where the rest is.
  if (job.chief) return 'part';
  if (job.phase !== 'running') return STATES[job.phase] ? job.phase : 'unknown';
  if (job.stuck) return 'stuck';
  const {waits_for: waitsFor = [], waits_s: waits = 0, median_step_s: median = 0} = job.progress || {};
  return waitsFor.length > 0 && waits >= Math.max(WAITING_S, WAITING_STEPS * median) ? 'waiting' : 'running';
}

export const ended = (job) => ['finished', 'failed', 'shut down'].includes(job.phase);

function showState(state) {
  const [sign, word, kind] = STATES[state] || STATES.gathering;
  setText($('state-sign'), sign);
  setText($('state-word'), word);
  const pill = $('state');
  if (pill.dataset.kind !== kind) pill.dataset.kind = kind;
  if (document.body.dataset.state !== state) document.body.dataset.state = state;
}

// Screen readers hear what is announced: changes of state, and no figures that change each second.
let state = '';
function announceState(text) {
  if (state === text) return;
  state = text;
  setText($('announcement'), text);
}

export const announce = (text) => setText($('announcement'), text);

function stateInWords(job) {
  switch (stateOf(job)) {
    case 'stuck': return `The job is stuck. ${withoutFigures(job.stuck)}`;
    case 'failed': return `The job failed. ${job.failure}`;
    case 'finished': return 'The job finished.';
    case 'shut down': return 'The job was shut down.';
    case 'gathering': return 'The job waits to begin.';
    case 'part': return job.headline;
    case 'unknown': return 'The state of the job is not known.';
    default: return 'The job is running.';
  }
}

// "no version for 12.4 s; waiting for rank 3 (w3 on host-b, last heard from 0.4 s ago)": the times change each second.
const withoutFigures = (text) => text.replace(/^no version for [^;]*; /, '').replace(/, last heard from [^,;)]* ago/g, '');

function tile(id, name, value, detail, kind = '') {
  let node = $(`tile-${id}`);
  if (!node) {
    node = element('div', {class: 'tile', id: `tile-${id}`}, element('dt', {}, name), element('dd', {class: 'value'}), element('dd', {class: 'detail'}));
    $('tiles').append(node);
  }
  const [title, main, small] = node.children;
  setText(title, name);
  setText(main, value);
  setText(small, detail || '');
  setClass(node, 'marked', kind === 'warn');
  setClass(node, 'wrong', kind === 'bad');
}

function showLoss({loss, evaluations = []}) {
  const mean = loss ? number(loss.mean) : null;
  const finite = mean === null || Number.isFinite(mean);
  tile('loss', 'Loss', loss ? figure(mean) : '–',
    !loss ? 'no batch yet' : finite ? `${figure(loss.least)} to ${figure(loss.largest)} in the last ${whole(loss.batches)} batches` : '▲ it is not a number',
    finite ? '' : 'bad');
  const best = evaluations.find((each) => known(each.accuracy)) || evaluations[0];
  if (!best) tile('evaluation', 'Accuracy', '–', 'no evaluation yet');
  else if (known(best.accuracy)) tile('evaluation', `Accuracy (${best.split})`, percent(best.accuracy), `at step ${whole(best.step)}, loss ${figure(best.loss)}`);
  else tile('evaluation', `Loss (${best.split})`, figure(best.loss), `at step ${whole(best.step)}`);
}

function showRates(job) {
  const {progress} = job;
  const running = job.phase === 'running';
  tile('samples', 'Samples/s', running ? figure(progress.samples_per_s) : '–', `${whole(progress.samples)} samples`);
  tile('steps', 'Steps/s', running ? figure(progress.steps_per_s) : '–', progress.median_step_s > 0 ? `median step ${duration(progress.median_step_s)}` : '');
  tile('time', 'Running for', duration(progress.running_s), ended(job) ? job.phase : progress.left_s > 0 && running ? `${duration(progress.left_s)} left` : 'the time left is not known');
}

function showHeldUp(job) {
  const worst = [...(job.workers || [])].sort((a, b) => b.held_up_s - a.held_up_s)[0];
  const slow = (job.workers || []).filter((each) => each.slow);
  if (slow.length > 0) tile('held', 'Slow', ranks(slow.map((each) => each.rank)), '▲ under half the median steps/s', 'warn');
  else if (worst && worst.held_up_s < (job.progress?.running_s || 0) / 50) tile('held', 'Held up by', 'nobody for long', worst.held_up_s >= 0.05 ? `at most ${duration(worst.held_up_s)}, by rank ${worst.rank}` : '');
  else if (worst && worst.held_up_s >= 0.05) tile('held', 'Held up most by', `rank ${worst.rank}`, `${duration(worst.held_up_s)} in all${worst.host ? `, on ${worst.host}` : ''}`, holdsUp(job, worst) ? 'warn' : '');
  else tile('held', 'Held up by', 'nobody', '');
}

function showCheckpoint(job) {
  const {checkpoints} = job;
  if (!checkpoints) tile('checkpoint', 'Checkpoint', 'none', 'the job writes none');
  else if (checkpoints.failure) tile('checkpoint', 'Checkpoint', 'failed', `▲ ${checkpoints.failure}`, 'bad');
  else if (!checkpoints.path) tile('checkpoint', 'Checkpoint', 'none yet', checkpoints.writing ? `writing for ${duration(checkpoints.writing_s)}` : '');
  else tile('checkpoint', 'Checkpoint', `${duration(checkpoints.age_s)} ago`, `version ${whole(checkpoints.version)}${checkpoints.writing ? `; writing for ${duration(checkpoints.writing_s)}` : ''}`);
}

// Ranks that others waited for, for much of the job's time and far longer than for the median rank.
export function holdsUp(job, worker) {
  if (!boundOf.has(job)) boundOf.set(job, heldUpBound(job));
  return worker.held_up_s > boundOf.get(job);
}

const boundOf = new WeakMap();  // By a job's snapshot: each row asks.

function heldUpBound(job) {
  const all = (job.workers || []).map((each) => each.held_up_s || 0).sort((a, b) => a - b);
  return Math.max(1, (job.progress?.running_s || 0) / 20, 3 * (all[(all.length - 1) >> 1] || 0));
}

function showHeadline(job) {
  // What comes after the first semicolon is whom the job waits for.
  const text = job.headline || '';
  const cut = job.chief ? -1 : text.indexOf('; ');
  const [main, rest] = cut < 0 ? [text, ''] : [text.slice(0, cut), text.slice(cut + 2)];
  setText($('headline-main'), rest ? `${main};` : main);
  setText($('headline-rest'), rest);
  setHidden($('headline-rest'), rest === '');
}

export function showTop(job) {
  const progress = job.progress || {};
  const now = stateOf(job);
  setText($('job-name'), job.job || 'A job');
  const counted = (n, word) => `${whole(n)} ${word}${n === 1 ? '' : 's'}`;
  setText($('job-facts'), [
    job.mode, job.optimizer, job.num_workers > 0 ? counted(job.num_workers, 'worker') : '',
    job.num_shards > 0 ? counted(job.num_shards, 'server') : '',
    job.parameters > 0 ? `${whole(job.parameters)} parameters` : '',
    ...Object.entries(job.hyperparameters || {}).map(([name, value]) => `${name.replaceAll('_', ' ')} ${figure(value)}`),
  ].filter(Boolean).join(' · '));
  showHeadline(job);
  showState(now);
  const share = progress.all_steps > 0 ? Math.min(1, progress.step / progress.all_steps) : null;
  setHidden($('progress'), share === null);
  if (share !== null) {
    $('progress').value = share;
    $('progress').setAttribute('aria-valuetext', `step ${whole(progress.step)} of ${whole(progress.all_steps)}`);
  }
  if (!job.chief) {
    showLoss(progress);
    showRates(job);
    showHeldUp(job);
    showCheckpoint(job);
  }
  const trouble = job.failure || job.stuck || '';
  setHidden($('trouble'), trouble === '' || (job.headline || '').includes(trouble));
  setText($('trouble-text'), trouble);
  announceState(stateInWords(job));
  setHidden($('gone'), true);
  const where = now === 'running' && progress.step ? `step ${whole(progress.step)}` : STATES[now][1];
  document.title = `${STATES[now][0]} ${where} – ${job.job || 'job'}`;
}

// All stays as it was; why, and since when.
export function showGone(reason, sinceMs, job, retryMs) {
  const finished = job && ended(job);
  setText($('gone-title'), finished ? `The job has ${job.phase === 'failed' ? 'failed' : 'ended'}, and its server with it` : job ? 'The server does not answer' : 'Nothing to show yet: the server does not answer');
  setText($('gone-text'), `${job ? `Since ${clockTime(sinceMs)}${finished ? ' nothing answers' : `: ${reason}`}. All that you see is as it was then.` : `${reason}.`} The page asks again every ${retryMs > 1000 ? shortDuration(retryMs / 1000) : 'second'}.`);
  setHidden($('gone'), false);
  if (!finished) showState('gone');
  setText($('freshness'), job ? `as of ${clockTime(sinceMs)}` : '');
  announceState(`${$('gone-title').textContent}.`);
  document.title = `${finished ? '■ ended' : '⚠ no answer'} – ${job?.job || 'job'}`;
}

