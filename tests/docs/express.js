// The part of Express 5 that the example of docs/receivers.md uses; request.body is undefined if there is no body.
const http = require("node:http");

module.exports = () => {
  const routes = new Map();
  return {
    post: (path, ...steps) => routes.set(path, steps),
    listen: (port, host) =>
      http
        .createServer((request, response) => {
          response.status = (code) => Object.assign(response, { statusCode: code });
          const steps = request.method === "POST" ? (routes.get(request.url) ?? []) : [];
          const run = ([step, ...rest]) => (step ? step(request, response, () => run(rest)) : response.status(404).end());
          run(steps);
        })
        .listen(port, host),
  };
};

module.exports.raw = () => async (request, response, next) => {
  const parts = await request.toArray();
  if (parts.length) request.body = Buffer.concat(parts);
  try {
    next();
  } catch {
    response.status(500).end();
  }
};
