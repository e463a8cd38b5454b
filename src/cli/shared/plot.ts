/** A line chart in Braille characters for the terminal. */

export interface Point {
  readonly x: number;
  readonly y: number;
}

/** Bits of the 2 x 4 dots of a Braille character, by row and column. */
const DOTS = [
  [0x01, 0x08],
  [0x02, 0x10],
  [0x04, 0x20],
  [0x40, 0x80],
];

export function plot(points: readonly Point[], { width = 64, height = 12, title = '' } = {}): string {
  const finite = points.filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y));
  if (finite.length === 0) return `${title}: nothing to plot`;
  const [xs, ys] = [finite.map(({ x }) => x), finite.map(({ y }) => y)];
  const [left, right, bottom, top] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const cells = Array.from({ length: height }, () => new Uint8Array(width));
  const column = (x: number) => Math.round(((x - left) / (right - left || 1)) * (2 * width - 1));
  const row = (y: number) => Math.round(((top - y) / (top - bottom || 1)) * (4 * height - 1));
  const dot = (c: number, r: number) => {
    cells[r >> 2][c >> 1] |= DOTS[r & 3][c & 1];
  };
  finite.forEach((point, i) => {
    const [c, r] = [column(point.x), row(point.y)];
    dot(c, r);
    if (finite.length === 1) cells[r >> 2][c >> 1] = 0xff; // a single dot would hardly be seen
    const next = finite[i + 1];
    if (!next) return;
    // Points are joined by lines, so that a sparse log is still a curve.
    const [across, down] = [column(next.x) - c, row(next.y) - r];
    const steps = Math.max(Math.abs(across), Math.abs(down));
    for (let k = 1; k < steps; k++) dot(Math.round(c + (across * k) / steps), Math.round(r + (down * k) / steps));
  });
  const label = (y: number) => y.toFixed(2).padStart(8);
  const lines = cells.map((line, r) => {
    const at = r === 0 ? label(top) : r === height - 1 ? label(bottom) : ' '.repeat(8);
    return `${at} ┤${Array.from(line, (bits) => String.fromCharCode(0x2800 + bits)).join('')}`;
  });
  const axis = `${' '.repeat(9)}└${'─'.repeat(width)}`;
  const ends = `${' '.repeat(10)}${String(left)}${String(right).padStart(width - String(left).length)}`;
  return [...(title ? [`${' '.repeat(10)}${title}`] : []), ...lines, axis, ends].join('\n');
}
