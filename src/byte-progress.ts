/** A line about bytes on their way: `[####......] 120 of 500 MB, 40 MB/s, 10 s left`. */

const BAR = 24;

export function describeProgress(done: number, total: number, ms: number): string {
  const filled = Math.min(BAR, Math.round((BAR * done) / Math.max(1, total)));
  const perSecond = done / Math.max(1e-3, ms / 1000);
  const left = done > 0 && done < total ? `, ${describeSeconds((total - done) / perSecond)} left` : '';
  return (
    `[${'#'.repeat(filled)}${'.'.repeat(BAR - filled)}] ${(done / 1e6).toFixed(0)} of ${(total / 1e6).toFixed(0)} MB, ` +
    `${(perSecond / 1e6).toFixed(perSecond < 1e7 ? 1 : 0)} MB/s${left}`
  );
}

function describeSeconds(seconds: number): string {
  if (seconds < 100) return `${Math.ceil(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}
