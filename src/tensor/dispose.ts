/// <reference lib="esnext.disposable" preserve="true" />
/**
 * Objects that hold device memory implement `Disposable`, so that `using` frees them at the end of a block.
 * `Symbol.dispose` exists from Node 20.4 on; earlier releases get the symbol that compiled `using` statements look for.
 */
if (!Symbol.dispose) Object.defineProperty(Symbol, 'dispose', { value: Symbol.for('Symbol.dispose') });

export const dispose: typeof Symbol.dispose = Symbol.dispose;
