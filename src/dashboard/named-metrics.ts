/** Metrics by name as chart data: own_metrics.csv or source_metrics.csv, with a column for each name that occurs. */
import { OWN_METRICS_CSV, readCsv } from '../run/logs/csv.js';
import { Buckets } from './buckets.js';
import type { ChartData } from './chart-data.js';

/** Buckets. A chart has fewer pixels. */
const CAPACITY = 1024;
/** A run may log under any names; a page of more charts is of no use. */
const MAX_METRICS = 50;

export function namedMetrics(path: string): ChartData {
  const { rows } = readCsv(path, OWN_METRICS_CSV);
  const names = [...new Set(rows.map(({ metric }) => metric))].slice(0, MAX_METRICS);
  const buckets = new Buckets(names, CAPACITY);
  // Rows of one step follow each other.
  for (let i = 0; i < rows.length; ) {
    const { step } = rows[i];
    const values = names.map(() => Number.NaN);
    for (; i < rows.length && rows[i].step === step; i++) {
      const at = names.indexOf(rows[i].metric);
      if (at >= 0) values[at] = rows[i].value;
    }
    buckets.add(step, Number.NaN, values);
  }
  return buckets.chartData(Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY, 0, 0);
}
