import java.time.OffsetDateTime;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.openapitools.client.ApiClient;
import org.openapitools.client.ApiException;
import org.openapitools.client.api.OverviewApi;
import org.openapitools.client.api.PlatformApi;
import org.openapitools.client.api.TimersApi;
import org.openapitools.client.model.*;

/** The round trip with the Java client of openapi-generator. */
public class RoundTrip {
    static void check(boolean holds, Object shown) {
        if (!holds) {
            throw new AssertionError(shown);
        }
    }

    public static void main(String[] arguments) throws ApiException {
        var later = OffsetDateTime.parse("2099-01-31T09:00:00Z");
        var client = new ApiClient();
        client.setBasePath(System.getenv("DUETIME_URL"));
        client.setApiKey(System.getenv("API_KEY"));
        var timers = new TimersApi(client);

        var created = timers.create(new CreateTimer()
            .id("trip-1")
            .delay("1h")
            .callbackUrl("http://127.0.0.1:9/hook")
            .callbackHeaders(Map.of("X-Tenant", "acme"))
            .payload(Map.of("invoice", 42))
            .correlationId("trip")
            .retryPolicy(new RetryPolicy().maxRetries(5).initialInterval("10s")));
        check(created.getStatus() == Status.PENDING && created.getCallbackSubject() == null, created);
        check(created.getPayload().equals(Map.of("invoice", 42.0)), created);
        check(created.getCallbackHeaders().equals(Map.of("X-Tenant", "acme")), created);
        check(created.getRetryPolicy().getMaxRetries() == 5, created);
        check(created.getRetryPolicy().getGiveUpOn().isEmpty(), created);

        check(timers.get("default", "trip-1").equals(created), created);

        var page = timers.callList(null, null, Status.PENDING, "trip", null, null, null, null);
        check(page.getTimers().equals(List.of(created)) && page.getNextCursor() == null, page);

        var updated = timers.update("default", "trip-1", new Changes().executeAt(later));
        check(updated.getExecuteAt().isEqual(later) && updated.getPayload().equals(created.getPayload()), updated);
        check(updated.getCallbackHeaders().equals(created.getCallbackHeaders()), updated);
        check(updated.getRetryPolicy().equals(created.getRetryPolicy()), updated);

        var canceled = timers.cancel("default", "trip-1");
        check(canceled.getStatus() == Status.CANCELED && canceled.getExecutedAt() == null, canceled);

        var good = new CreateTimer().id("trip-2").delay("1h").callbackUrl("http://127.0.0.1:9/hook");
        var bad = new CreateTimer().id("trip-3").delay("1h").callbackUrl("http://127.0.0.1:9/hook").executeAt(later);
        var results = timers.batch(new BatchIn().timers(List.of(good, bad)), null).getResults();
        var made = results.get(0);
        var refused = results.get(1);
        check(made.getStatus() == 200 && made.getTimer().getId().equals("trip-2") && made.getError() == null, made);
        check(refused.getStatus() == 400 && refused.getError().getDetails().equals(Map.of("field", "delay")), refused);

        var platform = new PlatformApi(client);
        var callback = new HttpCallback().type(HttpCallback.TypeEnum.HTTP);
        callback.url("http://127.0.0.1:9/platform").payload(List.of(1));
        var asked = new CreatePlatformTimer().executeAt(later).callback(new CreatePlatformTimerCallback(callback));
        var shown = platform.platformGet(UUID.fromString(platform.platformCreate(asked).getData().getId())).getData();
        check(shown.getExecuteAt().isEqual(later) && shown.getLastError() == null, shown);
        check(shown.getCallbackUrl().equals("http://127.0.0.1:9/platform"), shown);
        check(shown.getCallbackPayload().equals(List.of(1.0)), shown);

        var overview = new OverviewApi(client).overview();
        check(overview.getStatuses().get("pending") == 2, overview);

        try {
            platform.platformGet(new UUID(0, 0));
            throw new AssertionError("no error");
        } catch (ApiException error) {
            check(error.getCode() == 404, error);
            var failure = client.getJSON().getGson().fromJson(error.getResponseBody(), PlatformFailure.class);
            check(failure.getCode() == 3 && !failure.getMessage().isEmpty() && failure.getData() == null, failure);
        }

        try {
            timers.get("default", "missing");
            throw new AssertionError("no error");
        } catch (ApiException error) {
            check(error.getCode() == 404, error);
            Failure failure = client.getJSON().getGson().fromJson(error.getResponseBody(), Failure.class);
            check(failure.getError().equals("TIMER_NOT_FOUND") && !failure.getMessage().isEmpty(), failure);
        }
    }
}
