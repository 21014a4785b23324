// A series as the server keeps it: points of least, mean and largest over time, steps and samples. Values only.
import {number} from './words.js';

export const AXES = {time: 't', steps: 'steps', samples: 'samples'};

function point([t, steps, samples, least, mean, largest]) {
  return {t, steps, samples, least: number(least), mean: number(mean), largest: number(largest)};
}

export class Series {
  constructor() {
    this.points = [];
  }

  // What the server told since the cursor. True: something changed.
  take({reset, points}) {
    if (reset) this.points = [];
    if (points.length === 0) return reset;
    const news = points.map(point);
    const last = this.points[this.points.length - 1];
    if (last && news[0].t === last.t) this.points.pop();
    this.points.push(...news);
    return true;
  }

  get last() {
    return this.points[this.points.length - 1];
  }

  // The last point whose mean is not a finite number; undefined: there is none.
  get lastNotFinite() {
    return this.points.findLast((each) => !Number.isFinite(each.mean));
  }
}

// At most `rows` points, each of neighbours: their least, the mean of their means and their largest. So no spike is lost.
export function merged(points, rows) {
  const by = Math.ceil(points.length / rows);
  if (by <= 1) return points.map((each) => ({...each, points: 1}));
  const all = [];
  for (let at = 0; at < points.length; at += by) {
    const group = points.slice(at, at + by);
    const last = group[group.length - 1];
    all.push({
      t: last.t,
      steps: last.steps,
      samples: last.samples,
      least: Math.min(...group.map((each) => each.least)),
      mean: group.reduce((sum, each) => sum + each.mean, 0) / group.length,
      largest: Math.max(...group.map((each) => each.largest)),
      points: group.length,
    });
  }
  return all;
}

// Whether there is a band to be seen between least and largest.
export const hasBand = (points) => points.some((each) => each.largest > each.least);
