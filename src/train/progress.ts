/** What a person sees of a run: one line per logged step, and on a terminal a live line with the time left. */

export interface ProgressLine {
  readonly step: number;
  readonly loss: number;
  readonly learningRate: number;
  readonly tokensPerSecond: number;
  readonly mfu: number | null;
  readonly gradientNorm: number;
  readonly fetchMs: number;
  readonly fetchP50Ms: number;
  readonly fetchP95Ms: number;
  /** Log records dropped so far; shown if there are any. */
  readonly dropped?: number;
}

/** `step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | …`, the form the runbooks read. */
export function stepLine(line: ProgressLine): string {
  return [
    `step ${String(line.step).padStart(4, '0')}`,
    `loss ${line.loss.toFixed(4)}`,
    `lr ${exponent(line.learningRate)}`,
    `toks/s ${line.tokensPerSecond.toFixed(0)}`,
    ...(line.mfu === null ? [] : [`mfu ${(100 * line.mfu).toFixed(1)}%`]),
    `grad_norm ${line.gradientNorm.toFixed(2)}`,
    `fetch ${line.fetchMs.toFixed(0)}ms`,
    `fetch_p50 ${line.fetchP50Ms.toFixed(0)}ms`,
    `fetch_p95 ${line.fetchP95Ms.toFixed(0)}ms`,
    ...(line.dropped ? [`log_dropped ${line.dropped}`] : []),
  ].join(' | ');
}

/** 3.00e-04: two digits of exponent, as C prints it. */
function exponent(value: number): string {
  return value.toExponential(2).replace(/e([+-])(\d)$/, 'e$10$2');
}

export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return '?';
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const two = (value: number) => String(value).padStart(2, '0');
  return hours > 0 ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const BAR_WIDTH = 24;

/** What the live line needs of a stream; process.stderr is one. */
export interface Terminal {
  write(text: string): unknown;
  readonly isTTY?: boolean;
  readonly columns?: number;
}

/** A line that is rewritten in place; silent when the stream is no terminal, or when there is none. */
export class LiveLine {
  readonly #stream: Terminal | null;
  #shown = false;

  constructor(stream: Terminal | null) {
    this.#stream = stream?.isTTY ? stream : null;
  }

  show(step: number, steps: number, loss: number, tokensPerSecond: number, secondsLeft: number): void {
    if (!this.#stream) return;
    const filled = Math.round((BAR_WIDTH * step) / steps);
    const bar = `${'█'.repeat(filled)}${'░'.repeat(BAR_WIDTH - filled)}`;
    const text = `${bar} ${step}/${steps}  loss ${loss.toFixed(3)}  ${tokensPerSecond.toFixed(0)} tok/s  ${duration(secondsLeft)} left`;
    this.#stream.write(`\r\x1b[K${text.slice(0, (this.#stream.columns ?? 100) - 1)}`);
    this.#shown = true;
  }

  /** Removes the line before something else is printed. */
  clear(): void {
    if (this.#stream && this.#shown) this.#stream.write('\r\x1b[K');
    this.#shown = false;
  }
}
