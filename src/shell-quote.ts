/** Quotes an argument for a POSIX shell, so that a printed command can be pasted; plain words stay as they are. */
export function shellQuote(argument: string): string {
  return /^[\w@%+=:,./-]+$/.test(argument) ? argument : `'${argument.replaceAll("'", `'\\''`)}'`;
}
