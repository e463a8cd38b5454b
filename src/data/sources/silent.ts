/** The error of a source that delivers nothing. */
import { ExitCode, TrefoilError } from '../../errors.js';

/** Remedy in messages about time limits. */
export const MORE_TIME = 'allow more with data.loader_timeout (--loader-timeout of train, --timeout of data smoke)';

export function silentSource(seconds: number): TrefoilError {
  const remedy = `check the source, or ${MORE_TIME}`;
  return new TrefoilError(`the data source gave nothing for ${seconds} s: ${remedy}`, ExitCode.dataSource);
}
