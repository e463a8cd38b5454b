/**
 * Where each file of a run lies, and the marks that control it. Apart from the folder's writer, because a watchdog that looks
 * at a run should not load a YAML library for it.
 */
import { readdirSync, rmSync } from 'node:fs';
import { basename, join } from 'node:path';
import { errorCode, readText, writeFileAtomic } from '../files.js';

/** All names are here and nowhere else. */
export function runPaths(outDir: string) {
  const path = (...names: string[]): string => join(outDir, ...names);
  return {
    training: path('training.csv'),
    val: path('val.csv'),
    kStats: path('k_stats.csv'),
    fallbackCounters: path('fallback_counters.csv'),
    ownMetrics: path('own_metrics.csv'),
    sourceMetrics: path('source_metrics.csv'),
    attention: path('attention.jsonl'),
    samples: path('samples.jsonl'),
    /** The lines that rank 0 printed. */
    log: path('run.log'),
    /** Heartbeats of a rank. */
    heartbeat: (rank: number): string => path(`heartbeat_rank${rank}.jsonl`),
    /** The current section of a rank. */
    section: (rank: number): string => path(`.section_rank${rank}`),
    metrics: path('metrics.json'),
    env: path('env.json'),
    config: path('config.yaml'),
    checkpoints: path('checkpoints'),
    latest: path('checkpoints', 'latest'),
    model: path('model.safetensors'),
    modelConfig: path('config.json'),
    tensorboard: path('tb'),
    halt: path('.HALT'),
    anomalyType: path('.anomaly_type'),
    gateCollapseDetails: path('gate_collapse_details.json'),
    /** A dump of where the run was, by label. */
    stackdump: (label: string): string => path(`stackdump_${label}.txt`),
    lock: path('.lock'),
  } as const;
}

/** Paths of the files of a run. */
export type RunPaths = ReturnType<typeof runPaths>;

/** The reason to halt, or undefined. Any .HALT counts, also an empty one made by `touch`. */
export function readHalt(outDir: string): string | undefined {
  return readMark(runPaths(outDir).halt);
}

/** Asks a run of any process to save and stop. */
export function writeHalt(outDir: string, reason: string): void {
  writeFileAtomic(runPaths(outDir).halt, `halt: ${oneLine(reason)}\n`);
}

export function readAnomaly(outDir: string): string | undefined {
  return readMark(runPaths(outDir).anomalyType);
}

export function writeAnomaly(outDir: string, type: string): void {
  writeFileAtomic(runPaths(outDir).anomalyType, `${oneLine(type)}\n`);
}

/** Removes .HALT and .anomaly_type, as a start after a halt does. */
export function clearMarks(outDir: string): void {
  const { halt, anomalyType } = runPaths(outDir);
  for (const path of [halt, anomalyType]) rmSync(path, { force: true });
}

/** Removes the section files of ranks that were killed: a start writes those of its own ranks anew. */
export function clearSections(outDir: string): void {
  for (const name of readdirSync(outDir)) if (SECTION_NAME.test(name)) rmSync(join(outDir, name), { force: true });
}

const SECTION_NAME = /^\.section_rank\d+$/;

/** More than a person writes into a control file. */
const MARK_BYTES = 4096;

/** The text of a control file such as `.HALT`, without its label; undefined if the file does not exist. */
export function readMark(path: string): string | undefined {
  try {
    const text = readText(path, { links: 'refused', limit: MARK_BYTES });
    return text === undefined ? undefined : text.trim().replace(/^halt:\s*/, '') || 'no reason given';
  } catch (error) {
    // Somebody put it there, and that is the message; why it cannot be read is only a detail.
    return `${basename(path)} cannot be read: ${errorCode(error) ?? (error as Error).message}`;
  }
}

function oneLine(text: string): string {
  return text.replace(/\s+/g, ' ').trim();
}
