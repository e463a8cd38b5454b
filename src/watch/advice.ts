/** The next thing to do for a run, by its state: a command that can be copied. */
import { existsSync } from 'node:fs';
import { listCheckpoints } from '../run/checkpoint/read.js';
import type { RunView } from '../run/reader.js';
import { shellQuote } from '../text.js';
import { endOf, endStatus, type RunState, startOf } from './state.js';

/** Empty if there is nothing to do. */
export function adviceFor({ name }: Pick<RunState, 'name'>, view: RunView): string {
  const train = trainCommand(view);
  const resume = `${train} --resume auto`;
  const end = endOf(view.ranks, startOf(view));
  switch (name) {
    case 'running':
    case 'starting':
    case 'done':
      return '';
    case 'not started':
      return 'start it with npx trefoil train --out-dir';
    case 'suspended':
      return `kill -CONT ${view.owner?.pid} wakes it`;
    case 'stopped':
      return `continue with ${resume}`;
    case 'halted':
      return end && endStatus(end) === 'non-finite' ? afterNonFinite(view, end.step) : `continue with ${resume}`;
    case 'gave up':
      return `check the source with npx trefoil data smoke, then ${resume}`;
    case 'failed':
      return end && isOutOfMemory(view) ? `${LESS_MEMORY}, then ${resume}` : `remove the cause, then ${resume}`;
    case 'died':
      return isOutOfMemory(view)
        ? `${LESS_MEMORY}, then ${resume}`
        : `it was killed, or the machine failed (dmesg tells); continue with ${resume}`;
    case 'unknown':
      return 'look on the machine where it ran';
  }
}

const LESS_MEMORY =
  'lower train.batch_size (and raise train.accumulate_grad_batches) or train.seq_len, or set runtime.gradient_checkpointing';

/** A run that died with less free memory than this share of its own was probably killed for it. */
const LITTLE = 0.05;

/** Whether the run ended by a lack of memory, as its end says or the last heartbeats suggest. */
export function isOutOfMemory(view: RunView): boolean {
  const end = endOf(view.ranks, startOf(view));
  if (end) return endStatus(end) === 'out-of-memory' || /out of (GPU )?memory/i.test(end.detail ?? '');
  return view.ranks.some(({ beats }) => isScarce(beats.findLast(({ msg }) => msg === 'progress')));
}

/** Whether the host had hardly any memory left at a heartbeat. */
export function isScarce(beat: RunView['ranks'][number]['beats'][number] | undefined): boolean {
  if (beat?.host_mem_free === undefined || beat.host_mem_rss === undefined) return false;
  return beat.host_mem_free < LITTLE * (beat.host_mem_rss + beat.host_mem_free);
}

function trainCommand({ ranks, paths }: RunView): string {
  const world = ranks[0].beats.at(-1)?.world ?? 1;
  const launch = world > 1 ? `launch -n ${world} -- ` : '';
  return `npx trefoil ${launch}train --config ${shellQuote(paths.config)}`;
}

/** Steps before a number that is not finite in which spikes count as its beginning. */
const BEFORE = 100;

/**
 * A resume from the newest checkpoint with the same settings meets the same numbers. What helps is a checkpoint from before
 * the trouble began, half the learning rate, and leaving out the updates of spikes if there were any. Each attempt that
 * fails goes back by one checkpoint.
 */
function afterNonFinite(view: RunView, at: number): string {
  const steps = view.ranks[0].beats.filter(({ msg, step }) => msg === 'progress' && step >= at - BEFORE && step < at);
  const spiked = steps.filter(({ fb_spike: count = 0 }, i) => i > 0 && count > (steps[i - 1].fb_spike ?? 0));
  const begin = spiked[0]?.step ?? at;
  const failed = triedInVain(view);
  const sound = listCheckpoints(view.paths.checkpoints).filter(({ manifest, path }) => manifest && !failed.has(path));
  const chosen = sound.find(({ step }) => step < begin) ?? sound.at(-1);
  const rate = view.settings.lr === null ? 'RATE' : String(Number((view.settings.lr / 2).toPrecision(2)));
  const skip = spiked.length > 0 ? ' --set train.spike_skip=true' : '';
  const why =
    spiked.length > 0
      ? `${spiked.length} of the last ${steps.length} steps spiked, from step ${begin} on: spike_skip leaves such updates out`
      : 'no spike came before it, so train.spike_skip would not help';
  const change = `--lr ${rate}${skip}`;
  if (!chosen)
    return `there is ${failed.size > 0 ? 'no earlier checkpoint' : 'no checkpoint'}: start again with npx trefoil train --config ${shellQuote(view.paths.config)} --out-dir ${shellQuote(folderAfter(view.dir))} ${change} (half the learning rate; ${why})`;
  return `continue from step ${chosen.step} with ${trainCommand(view)} --resume ${shellQuote(chosen.path)} ${change} (half the learning rate; ${why})`;
}

/** The first of `run-2`, `run-3`, … that is not there. */
function folderAfter(dir: string): string {
  let attempt = 2;
  while (existsSync(`${dir}-${attempt}`)) attempt++;
  return `${dir}-${attempt}`;
}

/** Checkpoints from which a resume met a number that is not finite: their weights may be bad already. */
function triedInVain({ ranks: [{ beats }] }: RunView): ReadonlySet<string> {
  const tried = beats.map((beat, i) => {
    const isFailure = beat.msg === 'halt' && endStatus(beat) === 'non-finite';
    const boot = isFailure ? beats.slice(0, i).findLast(({ msg }) => msg === 'boot') : undefined;
    return boot && beat.step - boot.step <= BEFORE ? boot.detail?.replace(/^resumed from /, '') : undefined;
  });
  return new Set(tried.filter((path) => path !== undefined));
}
