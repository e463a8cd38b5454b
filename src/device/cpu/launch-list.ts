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
    const isFloat = (kind: ArgumentKind) => kind === 'f32' || kind === 'f64';
    const count = kinds.filter(isFloat).length;
    if (count > MAX_FLOATS || kinds.length - count > MAX_WORDS)
      throw new Error(`a kernel with ${kinds.length} arguments has no room in a recorded call`);
    const call = new DataView(new ArrayBuffer(CALL_BYTES));
    call.setBigUint64(0, address, true);
    let [words, floats] = [0, 0];
    for (const [i, kind] of kinds.entries()) {
      const value = values[i];
      const at = 8 * (1 + (isFloat(kind) ? MAX_WORDS + floats++ : words++));
      if (kind === 'struct')
        this.refuse(); // memory of JavaScript, which may move
      else if (kind === 'f32') call.setFloat32(at, value as number, true);
      else if (kind === 'f64') call.setFloat64(at, value as number, true);
      else call.setBigInt64(at, BigInt((value ?? 0) as bigint | number), true);
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

/** A recorded list of calls. The creator frees it. */
export interface LaunchList {
  /** Number of calls. */
  readonly count: number;
  /** Makes the calls again, with the same addresses and numbers. */
  replay(): void;
  free(): void;
}
