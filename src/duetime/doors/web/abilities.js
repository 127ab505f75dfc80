// What the service's database can do, as the session reports it. The page offers nothing else.

let known = { orders: [], timeSource: "store" };

export const learn = (abilities) => {
  known = abilities ?? known;
};

// The order in which the service lists the timers that match a filter.
function orderOf({ id, correlationId, executeAfter, executeBefore, status }) {
  if (id || correlationId) return "newest";
  if (executeAfter || executeBefore) return "soonest";
  if (!status) return "newest";
  return { pending: "due", executing: "deadline" }[status] ?? "finished";
}

export const lists = (filters) => known.orders.includes(orderOf(filters));

// Whether each instance uses its own machine's clock.
export const ownClocks = () => known.timeSource === "machine";
