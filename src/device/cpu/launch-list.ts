/**
 * Kernel calls that are recorded once and repeated with one call into native code. A step of decoding makes hundreds of them,
 * and its weights push JavaScript's objects out of the caches: a call from JavaScript then costs five microseconds.
 */
import type { ArgumentKind } from '../device.js';

/** Arguments of a recorded call: `Call` in runtime.cpp has room for as many. */
const MAX_WORDS = 32;
const MAX_FLOATS = 4;
const CALL_BYTES = 8 * (1 + MAX_WORDS + MAX_FLOATS);

/** Calls in the layout of `Call` in runtime.cpp. */
export class LaunchRecorder {
  /** Null after something that cannot be repeated. */
  #calls: ArrayBuffer[] | null = [];

  /** `address`: of the function; `values`: its arguments, with tensors as addresses. */
  add(address: bigint, kinds: readonly ArgumentKind[], values: readonly unknown[]): void {
    const call = new BigInt64Array(CALL_BYTES / 8);
    call[0] = address;
    let [words, floats] = [0, 0];
    for (const [i, kind] of kinds.entries()) {
      const value = values[i] as bigint | number | null;
      if (kind === 'f32' || kind === 'f64') {
        if (floats === MAX_FLOATS) throw new Error('a kernel has too many floats for a recorded call');
        const at = 1 + MAX_WORDS + floats++;
        if (kind === 'f32') new Float32Array(call.buffer, 8 * at)[0] = value as number;
        else new Float64Array(call.buffer, 8 * at)[0] = value as number;
      } else {
        if (words === MAX_WORDS) throw new Error('a kernel has too many arguments for a recorded call');
        if (kind === 'struct')
          this.refuse(); // memory of JavaScript, which may move
        else call[1 + words++] = BigInt(value ?? 0);
      }
    }
    this.#calls?.push(call.buffer);
  }

  /** Something was done that would have to be done anew. */
  refuse(): void {
    this.#calls = null;
  }

  /** All calls, one after another, and their number; null if they cannot be repeated. */
  finish(): { readonly bytes: Uint8Array; readonly count: number } | null {
    const calls = this.#calls;
    if (calls === null) return null;
    const bytes = new Uint8Array(calls.length * CALL_BYTES);
    for (const [i, call] of calls.entries()) bytes.set(new Uint8Array(call), i * CALL_BYTES);
    return { bytes, count: calls.length };
  }
}
