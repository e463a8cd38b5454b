/** Numbers and times as people read them. */

const DASH = '–';

/** Four significant digits, in plain or scientific notation; large whole numbers with thin spaces. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9))
    return Number(value.toPrecision(3)).toExponential().replace('+', '').replaceAll('-', '−');
  if (size >= 1000) return whole(value);
  return Number(value.toPrecision(4)).toString().replace('-', '−');
}

/** 12 345 */
export function whole(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return Math.round(value)
    .toString()
    .replace(/\B(?=(\d{3})+(?!\d))/g, '\u202f');
}

/** 1.2M, 340k: for axes and narrow places. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  for (const [unit, factor] of UNITS)
    if (size >= factor) return `${Number((value / factor).toPrecision(3)).toString()}${unit}`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return Number(value.toPrecision(3)).toString();
}

const UNITS: readonly (readonly [string, number])[] = [
  ['T', 1e12],
  ['G', 1e9],
  ['M', 1e6],
  ['k', 1e3],
];

export function percent(share: number | null | undefined, digits = 1): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return DASH;
  const least = 10 ** -digits;
  return share > 0 && 100 * share < least / 2 ? `< ${least} %` : `${(100 * share).toFixed(digits)} %`;
}

/** 45 s, 12 min, 3 h 20 min, 2 d 4 h */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  const rounded = Math.max(0, Math.round(seconds));
  if (rounded < 60) return `${rounded} s`;
  const minutes = Math.round(rounded / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 === 0 ? `${hours} h` : `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** 0:05, 12:30, 3:20:00: positions on a time axis. */
export function clock(seconds: number): string {
  const rounded = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(rounded / 3600), Math.floor((rounded % 3600) / 60), rounded % 60];
  const two = (value: number) => String(value).padStart(2, '0');
  return hours > 0 ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** 2026-03-01 14:05:09, local time. */
export function timestamp(seconds: number): string {
  if (!Number.isFinite(seconds) || Math.abs(seconds) > 8e12) return DASH;
  const date = new Date(seconds * 1000);
  const two = (value: number) => String(value).padStart(2, '0');
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
