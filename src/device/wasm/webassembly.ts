/** The part of the WebAssembly interface that the device uses: it is in TypeScript's library for browsers only. */

export interface WasmMemory {
  readonly buffer: SharedArrayBuffer;
}

/**
 * A compiled module.
 *
 * @opaque
 */
export type WasmModule = object;

interface Api {
  readonly Memory: new (options: { initial: number; maximum: number; shared: boolean }) => WasmMemory;
  readonly Module: new (bytes: Uint8Array) => WasmModule;
  readonly Instance: new (
    module: WasmModule,
    imports: Readonly<Record<string, object>>,
  ) => { readonly exports: Readonly<Record<string, unknown>> };
  readonly RuntimeError: new () => Error;
  validate(bytes: Uint8Array): boolean;
  /** As `new Module`, off the thread: pages may not wait for it. */
  compile(bytes: Uint8Array): Promise<WasmModule>;
}

export const Wasm = (globalThis as unknown as { readonly WebAssembly: Api }).WebAssembly;
