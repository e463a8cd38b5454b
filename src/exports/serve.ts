/**
 * A model over HTTP with the OpenAI API.
 *
 * @packageDocumentation
 */

export type { ListenOptions, ModelServer, ServedPage, ServeOptions } from '../serve/options.js';
export { serveModel } from '../serve/serve-model.js';
