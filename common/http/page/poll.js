// When to ask the server, and what it means if it does not answer. Polls by cursor: an event stream would use up one of
// the six connections that a browser has for a server.

const EVERY_MS = 1000;
const EVERY_MOST_MS = 10000;  // While the server does not answer.
const TIMEOUT_MS = 8000;

export async function get(path) {
  let reply;
  try {
    reply = await fetch(path, {signal: AbortSignal.timeout(TIMEOUT_MS), cache: 'no-store', credentials: 'omit'});
  } catch (error) {
    if (error.name === 'TimeoutError') throw new Error(`it did not answer within ${TIMEOUT_MS / 1000} s`);
    throw new Error('no connection to it, so it has ended, or the network between');
  }
  const text = await reply.text().catch(() => {
    throw new Error('the connection broke in the middle of an answer');
  });
  const answer = parsed(text);
  if (!reply.ok) throw new Error(`it answered ${reply.status}: ${String(answer?.error ?? text).trim().slice(0, 300)}`);
  if (answer === null) throw new Error('its answer is not JSON, so something else answers at this address');
  return answer;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// `take({job, series, events})` has what is new; `lost(reason, unixMs, retryMs)` tells each try that failed.
export class Poll {
  constructor({take, lost}) {
    this.take = take;
    this.lost = lost;
    this.cursor = '';
    this.next = 0;
    this.failures = 0;
    this.timer = 0;
    this.busy = false;
    document.addEventListener('visibilitychange', () => this.wake());
    window.addEventListener('online', () => this.wake());
  }

  // Asks now, unless nobody looks.
  wake() {
    clearTimeout(this.timer);
    if (document.hidden || this.busy) return;
    this.once();
  }

  async once() {
    this.busy = true;
    const begin = performance.now();
    const news = await this.ask();
    this.busy = false;
    const wait = this.failures ? this.pause() : Math.max(0, EVERY_MS - (performance.now() - begin));
    if (!document.hidden) this.timer = setTimeout(() => this.wake(), wait);
    if (news) this.take(news);
  }

  async ask() {
    try {
      const since = this.cursor ? `?since=${encodeURIComponent(this.cursor)}` : '';
      const [job, series, events] = await Promise.all([
        get('api/v1/job'), get(`api/v1/series${since}`), get(`api/v1/events?since=${this.next}`)]);
      this.cursor = series.cursor || '';
      // A server that was started again counts its events anew.
      const restarted = (events.next || 0) < this.next;
      this.next = restarted ? 0 : events.next || 0;
      this.failures = 0;
      return {job, series: series.series || {}, events: events.events || [], restarted};
    } catch (error) {
      this.failures += 1;
      this.lost(error.message, Date.now(), this.pause());
      return null;
    }
  }

  pause() {
    return this.failures < 4 ? EVERY_MS : Math.min(EVERY_MOST_MS, EVERY_MS * 2 ** (this.failures - 3));
  }
}
