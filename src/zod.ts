/** The part of zod that is used. scripts/build.mjs bundles it: the package would load 75 files, most of them languages. */

export type { core, infer, input, output, ZodNumber, ZodObject, ZodType } from 'zod';
export {
  array,
  boolean,
  custom,
  discriminatedUnion,
  enum,
  int,
  literal,
  looseObject,
  NEVER,
  number,
  object,
  preprocess,
  record,
  strictObject,
  string,
  toJSONSchema,
  tuple,
  union,
  unknown,
  ZodError,
} from 'zod';
