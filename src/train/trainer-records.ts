/** The files of a `Trainer` with `recordTo`: those of `train` that need no folder of checkpoints, and the end of the run. */
import { toYaml } from '../config/print.js';
import { RunFolder, refuseUsedFolder } from '../run/folder.js';
import type { SectionName } from '../run/logs/heartbeat.js';
import { clearMarks } from '../run/paths.js';
import { RunEnds } from './ends.js';
import { RunRecords } from './report.js';
import type { Trainer, TrainingStep } from './trainer.js';

export class TrainerRecords {
  readonly #trainer: Trainer;
  readonly #folder: RunFolder;
  readonly #records: RunRecords;
  readonly #ends: RunEnds;
  /** The newest step; written with the next one, so that `Trainer.log` can still add to it. */
  #held: TrainingStep | null = null;
  #hasEnded = false;

  /** Before the first step, or the first one after a resume. */
  constructor(outDir: string, trainer: Trainer) {
    const { config, world, progress } = trainer;
    if (progress.step === 0 && world.isFirst) refuseUsedFolder(outDir);
    this.#trainer = trainer;
    this.#folder = new RunFolder(outDir, world.rank);
    const { paths } = this.#folder;
    if (world.isFirst) {
      clearMarks(outDir);
      const steps = Number.isFinite(trainer.steps) ? { steps: trainer.steps } : {};
      this.#folder.writeConfig(toYaml({ ...config, train: { ...config.train, ...steps, out_dir: outDir } }));
    }
    this.#records = new RunRecords(paths, config, world, progress.step, null);
    this.#ends = new RunEnds(this.#folder, world, progress.step);
    this.#ends.records = this.#records;
    this.#ends.facts = () => ({ step: progress.step, first_loss: progress.firstLoss, last_loss: progress.lastLoss });
    this.#records.writeEvent({ step: progress.step, msg: 'boot' });
  }

  enter(section: SectionName, step: number): void {
    if (!this.#hasEnded) this.#records.enter(section, step);
  }

  hold(step: TrainingStep): void {
    this.#held = step;
    this.#records.enter('between', step.step);
  }

  /** Writes the step that is held. */
  flush(): void {
    const { config, steps } = this.#trainer;
    const held = this.#held;
    this.#held = null;
    if (held === null || this.#hasEnded) return;
    this.#records.writeStep(held);
    if (held.step === 1 || held.step % config.train.log_every === 0 || held.step === steps)
      this.#records.writeRow(held.step, held.metrics);
  }

  /** The end of the run: of its steps or its data, or by an error. */
  end(error: unknown): void {
    if (this.#hasEnded) return;
    this.flush();
    if (error === null) this.#ends.write({ status: 'done', detail: 'done' });
    else this.#ends.writeFailure(error, (line) => console.warn(`warning: ${line}`));
    this.#hasEnded = true;
  }

  close(): void {
    const { progress, steps } = this.#trainer;
    this.flush();
    if (!this.#hasEnded && progress.step < steps)
      this.#ends.write({ status: 'signalled', detail: 'freed before the last step' });
    else this.end(null);
    this.#records.close();
    this.#folder.close();
  }
}
