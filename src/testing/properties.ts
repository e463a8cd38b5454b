/** fast-check with a fixed seed, so that a run of the tests does not depend on luck; TREFOIL_LONG=1 tries new values. */
import fc from 'fast-check';

const seed = process.env['TREFOIL_SEED'] ?? (process.env['TREFOIL_LONG'] ? null : '1');
if (seed !== null) fc.configureGlobal({ seed: Number(seed) });

export default fc;
