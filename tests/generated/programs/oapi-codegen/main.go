// The round trip with the client of oapi-codegen.
package main

import (
	"context"
	"log"
	"net/http"
	"os"
	"reflect"
	"time"

	"example.com/roundtrip/client"
	"github.com/google/uuid"
)

func check(holds bool, shown any) {
	if !holds {
		log.Panicf("%+v", shown)
	}
}

func must[T any](value T, err error) T {
	check(err == nil, err)
	return value
}

func pointer[T any](value T) *T {
	return &value
}

func main() {
	later := time.Date(2099, 1, 31, 9, 0, 0, 0, time.UTC)
	ctx := context.Background()
	timers := must(client.NewClientWithResponses(os.Getenv("DUETIME_URL"), client.WithRequestEditorFn(
		func(_ context.Context, request *http.Request) error {
			request.Header.Set("X-API-Key", os.Getenv("API_KEY"))
			return nil
		})))

	timer := func(id string) client.CreateTimer {
		return client.CreateTimer{Id: &id, Delay: pointer("1h"), CallbackUrl: pointer("http://127.0.0.1:9/hook")}
	}
	asked := timer("trip-1")
	asked.CallbackHeaders = &map[string]string{"X-Tenant": "acme"}
	asked.Payload = map[string]any{"invoice": 42}
	asked.CorrelationId = pointer("trip")
	asked.RetryPolicy = &client.RetryPolicy{MaxRetries: pointer(5), InitialInterval: pointer("10s")}
	created := must(timers.CreateWithResponse(ctx, asked)).JSON200
	check(created.Status == client.StatusPending && created.CallbackSubject == nil, created)
	check(reflect.DeepEqual(created.Payload, map[string]any{"invoice": 42.0}), created)
	check(created.CallbackHeaders["X-Tenant"] == "acme", created)
	check(created.RetryPolicy.MaxRetries == 5 && len(created.RetryPolicy.GiveUpOn) == 0, created)

	got := must(timers.GetWithResponse(ctx, "default", "trip-1")).JSON200
	check(reflect.DeepEqual(got, created), got)

	page := must(timers.ListWithResponse(ctx, &client.ListParams{CorrelationId: pointer("trip"), Status: pointer(client.StatusPending)})).JSON200
	check(reflect.DeepEqual(page.Timers, []client.Timer{*created}) && page.NextCursor == nil, page)

	updated := must(timers.UpdateWithResponse(ctx, "default", "trip-1", client.Changes{ExecuteAt: &later})).JSON200
	check(updated.ExecuteAt.Equal(later) && reflect.DeepEqual(updated.Payload, created.Payload), updated)
	check(reflect.DeepEqual(updated.CallbackHeaders, created.CallbackHeaders), updated)
	check(reflect.DeepEqual(updated.RetryPolicy, created.RetryPolicy), updated)

	canceled := must(timers.CancelWithResponse(ctx, "default", "trip-1")).JSON200
	check(canceled.Status == client.StatusCanceled && canceled.ExecutedAt == nil, canceled)

	bad := timer("trip-3")
	bad.ExecuteAt = &later
	batch := client.BatchIn{Timers: []client.CreateTimer{timer("trip-2"), bad}}
	results := must(timers.BatchWithResponse(ctx, nil, batch)).JSON200.Results
	check(len(results) == 2, results)
	made, refused := results[0], results[1]
	check(made.Status == 200 && made.Timer.Id == "trip-2" && made.Error == nil, made)
	check(refused.Status == 400 && refused.Error.Details["field"] == "delay", refused)

	callback := client.CreatePlatformTimer_Callback{}
	check(callback.FromHttpCallback(client.HttpCallback{
		Type: client.Http, Url: pointer("http://127.0.0.1:9/platform"), Payload: []any{1},
	}) == nil, callback)
	platform := client.CreatePlatformTimer{ExecuteAt: later, Callback: &callback}
	summary := must(timers.PlatformCreateWithResponse(ctx, platform)).JSON201.Data
	shown := must(timers.PlatformGetWithResponse(ctx, uuid.MustParse(summary.Id))).JSON200.Data
	check(shown.ExecuteAt.Equal(later) && *shown.CallbackUrl == "http://127.0.0.1:9/platform", shown)
	check(reflect.DeepEqual(shown.CallbackPayload, []any{1.0}) && shown.LastError == nil, shown)

	overview := must(timers.OverviewWithResponse(ctx)).JSON200
	check(overview.Statuses["pending"] == 2, overview)

	nobody := must(timers.PlatformGetWithResponse(ctx, uuid.UUID{}))
	check(nobody.StatusCode() == 404 && nobody.JSON404.Code == 3 && nobody.JSON404.Data == nil, nobody)

	missing := must(timers.GetWithResponse(ctx, "default", "missing"))
	check(missing.StatusCode() == 404 && missing.JSON404.Error == "TIMER_NOT_FOUND", missing)
}
