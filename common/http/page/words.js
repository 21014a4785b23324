// Numbers, durations and bytes in words. Values only: nothing here knows the page.

// A number of the API: those that JSON cannot say come as strings ("NaN"); what is not known is null.
export function number(value) {
  if (typeof value === 'number') return value;
  if (value === 'NaN' || value === 'Infinity' || value === '-Infinity') return Number(value);
  return null;
}

export const known = (value) => value !== null && value !== undefined;

// "1,041"
export function whole(value) {
  const n = number(value);
  return n === null ? '–' : Number.isFinite(n) ? Math.round(n).toLocaleString('en-US') : String(n);
}

// Three digits that matter: "0.0412", "12.3", "1,041", "2.1e-7".
export function figure(value) {
  const n = number(value);
  if (n === null) return '–';
  if (!Number.isFinite(n)) return String(n).replace('Infinity', '∞');
  if (n === 0) return '0';
  const size = Math.abs(n);
  if (size >= 1e15 || size < 1e-4) return n.toExponential(1).replace('e+', 'e');
  if (size >= 100) return Math.round(n).toLocaleString('en-US');
  return Number(n.toPrecision(3)).toString();
}

// For axes: "12k", "1.2M".
export function short(value) {
  const size = Math.abs(value);
  const [by, unit] = size >= 1e12 ? [1e12, 'T'] : size >= 1e9 ? [1e9, 'G'] : size >= 1e6 ? [1e6, 'M'] : size >= 1e4 ? [1e3, 'k'] : [1, ''];
  if (unit === '') return figure(value);
  return `${Number((value / by).toPrecision(3))}${unit}`;
}

// "0.4 s", "12 s", "4 min", "2 h 5 min", "3 d 4 h", as logs and ps_ctl say it; shorter than a tenth: "12 ms", "80 µs".
export function duration(value) {
  const s = number(value);
  if (s === null || !Number.isFinite(s) || s < 0) return '–';
  if (s === 0) return '0 s';
  if (s < 0.001) return `${Number((s * 1e6).toPrecision(2))} µs`;
  if (s < 0.0995) return `${Number((s * 1e3).toPrecision(2))} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 119.5) return `${Math.round(s)} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${whole(Math.floor(hours / 24))} d ${hours % 24} h`;
}

// For axes of durations: "5 s", without a needless ".0".
export const shortDuration = (value) => duration(value).replace(/\.0 s$/, ' s');

// For the axis of time: "0:30", "12:00", "3:20:00".
export function stopwatch(value) {
  const s = Math.round(value);
  const two = (n) => String(n).padStart(2, '0');
  const [h, m] = [Math.floor(s / 3600), Math.floor(s / 60) % 60];
  if (s < 0) return '';
  return h > 0 ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

export function bytes(value) {
  let n = number(value);
  if (n === null) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  while (n >= 1024 && unit + 1 < units.length) {
    n /= 1024;
    ++unit;
  }
  return `${unit === 0 ? n : Number(n.toPrecision(3))} ${units[unit]}`;
}

// Writes a ratio as "93.1 %".
export function percent(value) {
  const n = number(value);
  if (n === null) return '–';
  if (!Number.isFinite(n)) return String(n);
  const hundredths = n * 100;
  return `${hundredths !== 0 && Math.abs(hundredths) < 0.1 ? '< 0.1' : Number(hundredths.toFixed(1))} %`;
}

// The time of the day; of another day, with its date.
export function clockTime(unixMs) {
  const when = new Date(unixMs);
  const time = when.toLocaleTimeString('en-GB');
  const today = new Date().toDateString() === when.toDateString();
  return today ? time : `${when.toLocaleDateString('en-GB', {day: 'numeric', month: 'short'})} ${time}`;
}

// "rank 3", "ranks 1 and 3", "ranks 0, 1 and 5 more"
export function ranks(list) {
  if (list.length === 1) return `rank ${list[0]}`;
  const named = list.length <= 3 ? list : list.slice(0, 2);
  const last = list.length <= 3 ? named[named.length - 1] : `${list.length - 2} more`;
  return `ranks ${(list.length <= 3 ? named.slice(0, -1) : named).join(', ')} and ${last}`;
}

// Takes a histogram's counts (one more than bounds), and gives the value that `share` of all are at or under, interpolated in its
// range. Null: there are none.
export function quantile(counts, bounds, share) {
  const all = (counts || []).reduce((sum, each) => sum + each, 0);
  if (all === 0) return null;
  let left = share * all;
  for (let i = 0; i < counts.length; ++i) {
    if (left <= counts[i] && counts[i] > 0) {
      if (i >= bounds.length) return bounds[bounds.length - 1];
      const from = i === 0 ? 0 : bounds[i - 1];
      return from + (bounds[i] - from) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return bounds[bounds.length - 1];
}
