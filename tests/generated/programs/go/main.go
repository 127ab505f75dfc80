// The round trip with the Go client of openapi-generator.
package main

import (
	"context"
	"errors"
	"log"
	"os"
	"reflect"
	"time"

	client "example.com/client"
)

func check(holds bool, shown any) {
	if !holds {
		log.Panicf("%+v", shown)
	}
}

func must[T any](value T, _ any, err error) T {
	check(err == nil, err)
	return value
}

func main() {
	later := time.Date(2099, 1, 31, 9, 0, 0, 0, time.UTC)
	configuration := client.NewConfiguration()
	configuration.Servers = client.ServerConfigurations{{URL: os.Getenv("DUETIME_URL")}}
	api := client.NewAPIClient(configuration)
	timers := api.TimersAPI
	ctx := context.WithValue(context.Background(), client.ContextAPIKeys, map[string]client.APIKey{
		"apiKey": {Key: os.Getenv("API_KEY")},
	})

	asked := client.NewCreateTimer()
	asked.SetId("trip-1")
	asked.SetDelay("1h")
	asked.SetCallbackUrl("http://127.0.0.1:9/hook")
	asked.SetCallbackHeaders(map[string]string{"X-Tenant": "acme"})
	asked.SetPayload(map[string]any{"invoice": 42})
	asked.SetCorrelationId("trip")
	policy := client.NewRetryPolicy()
	policy.SetMaxRetries(5)
	policy.SetInitialInterval("10s")
	asked.SetRetryPolicy(*policy)
	created := must(timers.Create(ctx).CreateTimer(*asked).Execute())
	check(created.Status == client.PENDING && created.CallbackSubject.Get() == nil, created)
	check(reflect.DeepEqual(created.Payload, map[string]any{"invoice": 42.0}), created)
	check(created.CallbackHeaders["X-Tenant"] == "acme", created)
	check(created.RetryPolicy.MaxRetries == 5 && len(created.RetryPolicy.GiveUpOn) == 0, created)

	got := must(timers.Get(ctx, "default", "trip-1").Execute())
	check(reflect.DeepEqual(got, created), got)

	page := must(timers.List(ctx).CorrelationId("trip").Status(client.PENDING).Execute())
	check(len(page.Timers) == 1 && reflect.DeepEqual(page.Timers[0], *created) && page.NextCursor.Get() == nil, page)

	changes := client.NewChanges()
	changes.SetExecuteAt(later)
	updated := must(timers.Update(ctx, "default", "trip-1").Changes(*changes).Execute())
	check(updated.ExecuteAt.Equal(later) && reflect.DeepEqual(updated.Payload, created.Payload), updated)
	check(reflect.DeepEqual(updated.CallbackHeaders, created.CallbackHeaders), updated)
	check(reflect.DeepEqual(updated.RetryPolicy, created.RetryPolicy), updated)

	canceled := must(timers.Cancel(ctx, "default", "trip-1").Execute())
	check(canceled.Status == client.CANCELED && canceled.ExecutedAt.Get() == nil, canceled)

	good, bad := client.NewCreateTimer(), client.NewCreateTimer()
	for id, one := range map[string]*client.CreateTimer{"trip-2": good, "trip-3": bad} {
		one.SetId(id)
		one.SetDelay("1h")
		one.SetCallbackUrl("http://127.0.0.1:9/hook")
	}
	bad.SetExecuteAt(later)
	batch := must(timers.Batch(ctx).BatchIn(*client.NewBatchIn([]client.CreateTimer{*good, *bad})).Execute())
	check(len(batch.Results) == 2, batch)
	made, refused := batch.Results[0], batch.Results[1]
	check(made.Status == 200 && made.Timer.Id == "trip-2" && !made.HasError(), made)
	check(refused.Status == 400 && refused.Error.Details["field"] == "delay", refused)

	callback := client.NewHttpCallback("http")
	callback.SetUrl("http://127.0.0.1:9/platform")
	callback.SetPayload([]any{1})
	platform := client.NewCreatePlatformTimer(later)
	platform.SetCallback(client.HttpCallbackAsCreatePlatformTimerCallback(callback))
	summary := must(api.PlatformAPI.PlatformCreate(ctx).CreatePlatformTimer(*platform).Execute()).Data
	shown := must(api.PlatformAPI.PlatformGet(ctx, summary.Id).Execute()).Data
	check(shown.ExecuteAt.Equal(later) && *shown.CallbackUrl.Get() == "http://127.0.0.1:9/platform", shown)
	check(reflect.DeepEqual(shown.CallbackPayload, []any{1.0}) && shown.LastError.Get() == nil, shown)

	overview := must(api.OverviewAPI.Overview(ctx).Execute())
	check(overview.Statuses["pending"] == 2, overview)

	_, _, err := api.PlatformAPI.PlatformGet(ctx, "00000000-0000-4000-8000-000000000000").Execute()
	var refusal *client.GenericOpenAPIError
	check(errors.As(err, &refusal), err)
	reason, known := refusal.Model().(client.PlatformFailure)
	check(known && reason.Code == 3 && reason.Message != "" && reason.Data.Get() == nil, refusal)

	_, _, err = timers.Get(ctx, "default", "missing").Execute()
	var failed *client.GenericOpenAPIError
	check(errors.As(err, &failed), err)
	failure, is := failed.Model().(client.Failure)
	check(is && failure.Error == "TIMER_NOT_FOUND" && failure.Message != "", failed)
}
